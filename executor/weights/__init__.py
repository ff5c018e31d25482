"""Weights: checkpoint files, and the memory that packed weights are placed in."""
