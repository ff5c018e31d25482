"""What is known of a model and a machine without loading weights: files, hub cache, sizes, memory
plan, diagnosis.
"""
