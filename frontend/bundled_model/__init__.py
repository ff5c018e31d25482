"""The model that ships with Quire, as package data; tests/bundled_model/ holds how it was made.
May know: nothing, it is a folder of files.
Must not know: who loads it."""
