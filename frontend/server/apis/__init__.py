"""The format of each API: the meaning of its bodies, and its responses and streams.

Must not know: URLs.
"""
