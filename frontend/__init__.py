"""The frontend: text in, text out. Tokenizes, validates, hands requests to a client, and turns
tokens back into text.

Must not know: torch, blocks, schedules; engine internals are reached through the client only.
"""
