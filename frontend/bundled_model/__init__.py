"""The model that ships with Quire, as package data; tests/bundled_model/ holds how it was made.

Must not know: who loads it.
"""
