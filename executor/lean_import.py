"""Imports torch into an engine's own process without the modules that the engine never uses. This
saves a third of the import time and a quarter of its memory.

Must not know: what torch is used for.
"""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..ipc import platform_tuning
from ..ipc.plugins import installed_plugins

if TYPE_CHECKING:
    from ..ipc.config import EngineConfig

# This module has kernels for tensors without data, and takes half a second to run. Only torch's
# compiler and the device "meta" need them; Quire uses neither.
_DEFERRED = "torch._meta_registrations"
# the first module that torch imports after loading its libraries
_AFTER_LIBRARIES = "torch._tensor"


def import_torch(config: EngineConfig | None = None) -> None:
    """Imports torch, in a process that never runs another program's code, except plugins and logits
    processors.

    Without `config`, it assumes a CPU and no logits processors; a second call may pass the
    `config`. If torch is already imported, it only adds what that `config` needs.
    """
    is_ours = config is None or (
        config.device_config.device == "cpu" and not config.model_config.logits_processors
    )
    if "torch" in sys.modules:
        if not is_ours and (deferred := sys.modules.get(_DEFERRED)) is not None:
            hasattr(deferred, "__all__")  # runs it
        return
    _load_libraries()
    is_ours = is_ours and platform_tuning.is_enabled() and not installed_plugins()
    if is_ours:
        # numpy's own library for products starts threads that spin, and Quire does not use it
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    finder = _Finder(_DEFERRED if is_ours else "")
    sys.meta_path.insert(0, finder)
    try:
        import torch  # noqa: F401
    finally:
        sys.meta_path.remove(finder)
    platform_tuning.unmap_unchanged()


def _load_libraries() -> None:
    """Loads torch's libraries without the GIL. The import would hold it for 0.2 s, while another
    thread imports the core and handles the configuration.
    """
    spec = find_spec("torch")
    path = Path((spec and spec.origin) or "").parent / "lib" / "libtorch_python.so"
    if path.is_file():
        load = ctypes.CDLL(None).dlopen  # ctypes.CDLL(path) holds the GIL
        load.argtypes, load.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        load(bytes(path), os.RTLD_NOW)


class _Finder(MetaPathFinder, Loader):
    """Makes a module empty until its first attribute access, which runs it.

    If torch accesses it during the import, nothing changes.
    """

    def __init__(self, deferred: str):
        self._deferred = deferred

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _AFTER_LIBRARIES:
            platform_tuning.unmap_unchanged()
        spec = PathFinder.find_spec(fullname, path) if fullname == self._deferred else None
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        def run(name: str) -> Any:
            vars(module).pop("__getattr__", None)
            self._loader.exec_module(module)
            return getattr(module, name)

        module.__getattr__ = run
