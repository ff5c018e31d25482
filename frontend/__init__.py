"""The frontend: tokenizes and validates requests, sends them to an engine client, and converts
tokens back to text.

The root has the public classes, their session, outputs and arguments; each folder's docstring is
its map.

Must not know: torch, blocks, schedules; engine internals are accessible through the client only.
"""
