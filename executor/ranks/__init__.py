"""Several ranks that run one model: processes, what connects them, and the executor over them.

    engine process                           rank processes (`python -m quire.executor.ranks.rank`)
    MultiprocExecutor ── commands.send ────▶ every rank: Worker with its part of the layers
                      ◀─ reply rings ──────  one result from each, compared

`executor.py` is the engine's side, `rank.py` a rank's program, `messages.py` what they say to each
other. `ring.py` carries messages through shared memory, `tensor_group.py` adds and joins tensors of
ranks.
"""
