"""The routes of the server, one module per family of endpoints.
May know: what the server's other modules offer.
Must not know: each other."""
