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
from importlib.metadata import version
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
_META = "torch._meta_registrations"
# What else torch imports for its compiler and for training, by the version that has it. A version
# that is not here has other circles among its modules, and defers _META alone.
_DEFERRED = {
    "2.13": (
        _META,
        "torch._higher_order_ops",
        "torch.ao",
        "torch.compiler",
        "torch.distributed._meta_registrations",
        "torch.distributions",
        "torch.export",
        "torch.func",
        "torch.masked",
        "torch.nested",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.optim",
        "torch.profiler",
        "torch.quantization",
        "torch.utils.data",
    )
}
# functions of these modules that torch makes its own while it is imported
_FUNCTIONS = {
    "torch._higher_order_ops": ("cond", "while_loop"),
    "torch.func": ("vmap",),
}
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
        if not is_ours:
            run_deferred()
        return
    _load_libraries()
    is_ours = is_ours and platform_tuning.is_enabled() and not installed_plugins()
    if is_ours:
        # numpy's own library for products starts threads that spin, and Quire does not use it
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        _finder.defer(*deferred_modules())
    sys.meta_path.insert(0, _finder)
    import torch  # noqa: F401

    _finder.end_import()
    if not is_ours:
        sys.meta_path.remove(_finder)
    platform_tuning.unmap_unchanged()


def deferred_modules() -> tuple[str, ...]:
    """What the installed torch runs only when it is used."""
    release = ".".join(version("torch").split(".")[:2])
    return _DEFERRED.get(release, (_META,))


def run_deferred() -> None:
    """Runs the modules that are deferred, for code of others, which expects torch to be whole."""
    _finder.run_all()


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
    """Makes modules empty until their first attribute access, or the import of one of their own
    modules, which runs them.

    If torch does either during its import, nothing changes.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._waiting: dict[str, ModuleType] = {}
        self._is_importing = True

    def defer(self, *names: str) -> None:
        self._names = names

    def end_import(self) -> None:
        """torch is imported, and what is accessed from now on is used."""
        self._is_importing = False

    def run_all(self) -> None:
        for module in list(self._waiting.values()):
            self._run(module)

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _AFTER_LIBRARIES:
            platform_tuning.unmap_unchanged()
        if (package := self._waiting.get(fullname.rpartition(".")[0])) is not None:
            self._run(package)
            if (module := sys.modules.get(fullname)) is not None:  # the package has imported it
                module.__spec__ = ModuleSpec(fullname, _Imported(module))
                return module.__spec__
        spec = PathFinder.find_spec(fullname, path) if fullname in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader, spec.loader_state = self, spec.loader
        return spec

    def exec_module(self, module: ModuleType) -> None:
        def access(name: str) -> Any:
            if self._is_importing and name in _FUNCTIONS.get(module.__name__, ()):
                return lambda *args, **kwargs: getattr(module, name)(*args, **kwargs)
            self._run(module)
            return getattr(module, name)

        module.__getattr__ = access
        self._waiting[module.__name__] = module

    def _run(self, module: ModuleType) -> None:
        if self._waiting.pop(module.__name__, None) is not None:
            del vars(module)["__getattr__"]
            spec = module.__spec__
            assert spec is not None
            module.__loader__ = spec.loader = loader = spec.loader_state
            loader.exec_module(module)


class _Imported(Loader):
    """Returns a module that is imported already: importlib looks once for a module whose package it
    finds imported.
    """

    def __init__(self, module: ModuleType):
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


_finder = _Finder()
