"""Each API's shapes: what its bodies ask for, and what its answers and streams look like.

Must not know: URLs.
"""
