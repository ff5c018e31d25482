"""The engine core: which requests run in a step, in which KV-cache blocks, and what they produced.

Must not know: text, tensors (engine_core.py alone passes work to the executor), sockets
(engine_proc.py alone).

`engine_core.py` holds the step, `engine_proc.py` the process around it; `scheduling/` and
`kv_cache/` decide.
"""
