"""Imports torch into an engine's own process without the modules that the engine never uses. This
saves a third of the import time and a quarter of its memory.

Must not know: what torch is used for.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..ipc import platform_tuning
from ..ipc.plugins import installed_plugins
from .torch_libraries import load_libraries

if TYPE_CHECKING:
    from importlib.abc import Loader

    from ..ipc.config import EngineConfig
else:  # what is inherited is not needed, and importing it takes 20 ms
    Loader = object

# This module has kernels for tensors without data, and takes half a second to run. Only torch's
# compiler and the device "meta" need them; Quire uses neither.
_META = "torch._meta_registrations"
# What else torch imports for its compiler and for training, by the version that has it. A version
# that is not here has other circles among its modules, and defers _META alone.
_DEFERRED = {
    "2.13": (
        _META,
        "torch._higher_order_ops",
        "torch._native",  # kernels in Triton and CuTe DSL for operations on GPUs
        "torch.ao",
        "torch.compiler",
        "torch.distributed._meta_registrations",
        "torch.distributions",
        "torch.export",
        "torch.func",
        "torch.hub",
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
        "torchgen",
        "torchgen.model",
        "unittest",
        "unittest.mock",
    )
}
# functions of these modules that torch makes its own while it is imported
_FUNCTIONS = {
    "torch._higher_order_ops": ("cond", "while_loop"),
    "torch.func": ("vmap",),
    "torch.hub": ("tqdm",),
}


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
    is_ours = is_ours and platform_tuning.is_enabled() and not installed_plugins()
    if is_ours:
        # numpy's own library for products starts threads that spin, and Quire does not use it
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        _finder.defer(*deferred_modules())
    load_libraries()
    sys.meta_path.insert(0, _finder)
    import torch  # noqa: F401

    _finder.end_import()
    if not is_ours:
        sys.meta_path.remove(_finder)


def deferred_modules() -> tuple[str, ...]:
    """What the installed torch runs only when it is used."""
    from importlib.metadata import version  # it imports zipfile, email and csv

    release = ".".join(version("torch").split(".")[:2])
    return _DEFERRED.get(release, (_META,))


def run_deferred() -> None:
    """Runs the modules that are deferred, for code of others, which expects torch to be whole."""
    _finder.run_all()


class _Finder(Loader):
    """Makes modules empty until their first attribute access, or the import of one of their own
    modules that is not deferred, which runs them.

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
        package = self._waiting.get(fullname.rpartition(".")[0])
        if package is not None and fullname not in self._names:
            self._run(package)
            if (module := sys.modules.get(fullname)) is not None:  # the package has imported it
                module.__spec__ = ModuleSpec(fullname, _Imported(module))
                return module.__spec__
        spec = PathFinder.find_spec(fullname, path) if fullname in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader, spec.loader_state = self, spec.loader
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        def access(name: str) -> Any:
            if name == "__path__":  # an import asks; a package has it before it runs
                raise AttributeError(name)
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
