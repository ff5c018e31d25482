"""The page at /: data only, the file beside this one.
May know: nothing.
Must not know: anything."""
