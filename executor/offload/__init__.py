"""Keeps cached KV blocks outside the KV cache.

`block_store.py` stores blocks, `kv_offload.py` says what they are valid for and moves them,
`names.py` has the names of states. With several ranks, `ranks/offload.py` has the book.
"""
