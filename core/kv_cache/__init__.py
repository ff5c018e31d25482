"""Which request owns which KV-cache block: the manager of requests' blocks over the pool of all
blocks.
"""
