"""The frontend: tokenizes and validates requests, sends them to an engine client, and converts
tokens back to text.

Must not know: torch, blocks, schedules; engine internals are accessible through the client only.
"""
