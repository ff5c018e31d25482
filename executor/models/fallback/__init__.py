"""Runs transformers' modelling code on Quire's layers and paged attention, for architectures that
ipc/models/ has no row for.

`model.py` is the model, `modules.py` replaces modules of transformers, `attention.py` is the
attention function that they call, `names.py` maps a checkpoint's names.
"""

# transformers imports torch's compiler, which needs what executor/lean_import.py defers
from torch._meta_registrations import register_meta
