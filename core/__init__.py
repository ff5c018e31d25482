"""The engine core: which requests run in a step, in which KV-cache blocks, and what came out.

Must not know: text, tensors (engine_core.py alone hands work to the executor), sockets
(engine_proc.py alone).
"""
