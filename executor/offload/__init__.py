"""Keeps cached KV blocks outside the KV cache.

`block_store.py` stores blocks, `kv_offload.py` says what they are valid for and moves them.
"""
