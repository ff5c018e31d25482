"""Traces of the engine's steps: folded, compared, and in several forms of output."""
