"""This package holds the operations of a model (`ops.py`), their implementations and the registry
that selects them.

Must not know: text, requests, sockets, or any other package of quire except the errors of `ipc`.
"""

from . import ops, registry
from .ops import AttentionMetadata
from .registry import Facts, OpTable, register, select

# isort: split
from . import cpu, reference

registry.import_when_asked("cuda", f"{__name__}.triton")

__all__ = ["AttentionMetadata", "Facts", "OpTable", "ops", "register", "registry", "select"]
