"""Cached KV blocks outside the KV cache: the store that keeps them, what they are valid for, and
how they move.
"""
