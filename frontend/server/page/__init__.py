"""The page at /: data only, the file beside this one.

Must not know: anything.
"""
