"""Runs transformers' modelling code on Quire's layers and paged attention, for architectures that
ipc/models/ has no row for.

`model.py` is the model, `modules.py` replaces modules of transformers, `attention.py` is the
attention function that they call, `names.py` maps a checkpoint's names.
"""

from ...lean_import import run_deferred

run_deferred()  # transformers imports torch's compiler, and programs of others use all of torch
