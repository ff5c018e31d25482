"""Facts about a model and a machine that need no loaded weights: files, hub cache, sizes, memory
plan.
"""
