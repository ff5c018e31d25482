"""Imports the executor, and torch with it, when a process is to run a model.

Must not know: what an executor does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ipc.config import EngineConfig
from ..ipc.errors import ModelLoadError
from ..ipc.threads import start_in_thread

if TYPE_CHECKING:
    from ..executor.executor import Executor

Report = Callable[[str, float], None]


def begin_import(device: str = "cpu") -> Future[Any]:
    """Imports what runs a model on `device` ("cpu" or "cuda"), in a thread, before the
    configuration is known. It takes no memory of a GPU. The calling thread may import the core
    meanwhile.
    """
    return start_in_thread(partial(_import_worker, device))


def _import_worker(device: str) -> None:
    if device == "cpu":
        from ..executor.lean_import import import_torch

        import_torch()
    from ..executor import device as devices
    from ..executor import worker  # noqa: F401

    devices.import_kernels(device)


def _read_header(model: Path) -> None:
    """Reads the header of a GGUF file, which is kept, while torch's libraries load."""
    from ..ipc.models.gguf import is_gguf, read_gguf

    if is_gguf(model):
        with contextlib.suppress(ModelLoadError):  # the loader raises it again
            read_gguf(model)


def import_executor(
    config: EngineConfig, report: Report, *, is_alone: bool, imported: Future[Any] | None
) -> Executor:
    """Makes the executor of a configuration. See EngineCore for the arguments."""
    from ..executor.torch_libraries import load_libraries
    from ..executor.weights import early_memory
    from ..ipc.models.ranks import num_ranks

    report("import", 0.0)
    early_memory.begin(config, wait_for_import=None if imported is None else load_libraries)
    if imported is not None:
        _read_header(Path(config.model_config.model))
        imported.result()
    if is_alone and num_ranks(config) == 1:  # ranks import torch in their own processes
        from ..executor.lean_import import import_torch

        import_torch(config)
    from ..executor.executor import make_executor

    executor = make_executor(config)
    report("import", 1.0)
    return executor
