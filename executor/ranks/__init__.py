"""Several ranks that run one model: processes, what connects them, and the executor over them.

    engine process                           rank processes (`python -m quire.executor.ranks.rank`)
    MultiprocExecutor ── commands.send ────▶ every rank: Worker with its part of the layers
                      ◀─ reply rings ──────  one result from each, compared

`multiproc_executor.py` is the engine's side, `rank.py` a rank's program, `messages.py` what they
say to each other. `local_ranks.py` starts ranks on this machine; `ring.py` and `shared_links.py`
carry messages and tensors through shared memory. Between machines `network.py` carries messages
and `torch_links.py` tensors, which it also does between GPUs. What layers see of other ranks is in
`groups/`.
"""
