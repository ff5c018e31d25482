"""The routes of the server, one module per family of endpoints.

Must not know: each other.
"""
