"""Weights: checkpoint files and the memory they are read into."""
