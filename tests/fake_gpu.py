"""A GPU without a GPU: tensors that say that they are on cuda:0, hold their values in host memory,
and refuse what a real GPU's tensors refuse.

A computation of tensors of both devices raises an error, as does `numpy()`; copies are explicit.
Kernels are those of the CPU, so tokens have the CPU's bits. Graphs are repeated calls
(tests/executor/on_device.py), a stream is done at once. Its memory is counted (FakeGpu), and its
clock, which events read, ticks with each operation of the table. Ranks that are threads have one
each, connected by gloo in NCCL's place. What is not shown: the kernels of a GPU, NCCL, the order of
streams, speed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from quire.executor import device, worker
from quire.executor.groups.process_group import make_process_group
from quire.executor.ranks import torch_links
from quire.executor.tracing.instruments import tensors_of
from quire.kernels import registry
from quire.kernels.metadata import AttentionMetadata
from quire.kernels.reference.gguf_blocks import FP8_TYPES
from quire.tests.executor.on_device import FakeCapture
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten
# copies between devices, and operations that take indices of the host
BETWEEN_DEVICES = {
    aten.copy_.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}
# operations whose result the host needs
WAITED_FOR = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
# operations with tensors of the host as well as the device, by their contracts
WITH_THE_HOST = {"copy_blocks"}


class FakeGpu:
    """What is known of the GPU, by the bytes of living tensors and packed weights; what a kernel
    takes while it runs is not counted.
    """

    def __init__(self) -> None:
        self.allocated = self.peak = 0
        self.captures: list[FakeCapture] = []
        self.clock_ms = 0.0
        self.refuses_waits = False  # as with torch.cuda.set_sync_debug_mode("error")
        self._places: weakref.WeakValueDictionary[int, _Place] = weakref.WeakValueDictionary()

    def place_of(self, storage: torch.UntypedStorage) -> _Place:
        """Counts a storage until the returned object is gone."""
        place = self._places.get(storage._cdata)
        if place is None:
            place = self._places[storage._cdata] = _Place(self, storage.nbytes())
        return place

    @property
    def num_graphs(self) -> int:
        """Graphs that someone can still replay."""
        return sum(len(capture.graphs) for capture in self.captures)

    def capture(self) -> FakeCapture:
        self.captures.append(FakeCapture())
        return self.captures[-1]

    def reset_peak(self) -> None:
        self.peak = self.allocated


class _Place:
    """Memory of the GPU."""

    def __init__(self, gpu: FakeGpu, num_bytes: int):
        self._gpu, self._num_bytes = gpu, num_bytes
        gpu.allocated += num_bytes
        gpu.peak = max(gpu.peak, gpu.allocated)

    def __del__(self) -> None:
        self._gpu.allocated -= self._num_bytes


_gpu = FakeGpu()  # the one of `fake_gpu`


class OnGpu(torch.Tensor):
    """A tensor of the GPU. `held` has its values."""

    held: torch.Tensor
    place: _Place

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CPU,  # torch guards what it knows to be on cuda
        )
        made.held = inner
        made.place = _gpu.place_of(inner.untyped_storage())
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        _wait()
        return self.held.numpy().copy()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def tolist(self) -> Any:
        _wait()
        return self.held.tolist()

    def record_stream(self, s: Any) -> None:
        pass

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.held!r})"


def run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Computes an operation of torch where its tensors are."""
    wrappers: dict[int, OnGpu] = {}
    on_host, wanted = [], []

    def unwrap(value: Any) -> Any:
        if isinstance(value, OnGpu):
            wrappers[id(value.held)] = value
            return value.held
        if isinstance(value, torch.Tensor):
            on_host.append(value)
        if isinstance(value, torch.device):
            wanted.append(value.type)
            return CPU
        return value

    is_conversion = func.overloadpacket in (aten.to, aten._to_copy)
    args, kwargs = _mapped(unwrap, args), {k: _mapped(unwrap, v) for k, v in kwargs.items()}
    if kwargs.pop("pin_memory", None):
        kwargs["pin_memory"] = False
    if func is aten.to.other:
        wanted.append("cuda" if id(args[1]) in wrappers else "cpu")
    is_on_gpu = wanted[-1] == "cuda" if wanted else bool(wrappers)
    if wrappers and on_host and not is_conversion and func not in BETWEEN_DEVICES:
        if any(tensor.dim() for tensor in on_host):
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {func} got tensors of "
                f"{[list(tensor.shape) for tensor in on_host]} on the host"
            )
    moves = is_conversion and is_on_gpu != bool(wrappers)
    if func in WAITED_FOR and wrappers:
        _wait()
    if moves or (func is aten.copy_.default and wrappers and on_host):
        if not (kwargs.get("non_blocking") or (func is aten.copy_.default and True in args[2:])):
            _wait()
    result = func(*args, **kwargs)

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if moves:
            value = value.clone()
        if not is_on_gpu:
            return value
        known = wrappers.get(id(value))
        return OnGpu(value) if known is None else known

    return _mapped(wrap, result)


def _wait() -> None:
    if _gpu.refuses_waits:
        raise RuntimeError("called a synchronizing CUDA operation")


def _set_sync_debug_mode(mode: str) -> None:
    _gpu.refuses_waits = mode == "error"


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to what tuples and lists hold."""
    if isinstance(value, (tuple, list)):
        return type(value)([_mapped(function, item) for item in value])
    return function(value)


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import it, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class _Kernels:
    """Runs the CPU's kernels on tensors of the GPU."""

    def __init__(self) -> None:
        self._metadata: Any = weakref.WeakKeyDictionary()

    def on_gpu(self, op: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(registry.CONTRACTS[op])
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._inner(op, (args, kwargs))
            _gpu.clock_ms += 1
            return self._outer(function(*args, **kwargs))

        return call

    def _inner(self, op: str, value: Any) -> Any:
        if isinstance(value, OnGpu):
            return value.held
        if isinstance(value, torch.Tensor):
            assert op in WITH_THE_HOST, f"{op} got a tensor of the host: {list(value.shape)}"
            return value
        if isinstance(value, _Packed):
            return value.function
        if isinstance(value, AttentionMetadata):
            return self._inner_metadata(op, value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._inner(op, item) for item in value))
        if isinstance(value, (tuple, list)):
            return type(value)(self._inner(op, item) for item in value)
        if isinstance(value, dict):
            return {name: self._inner(op, item) for name, item in value.items()}
        if is_dataclass(value) and not isinstance(value, type):
            parts = {one.name: getattr(value, one.name) for one in fields(value) if one.init}
            return replace(value, **self._inner(op, parts))
        return value

    def _inner_metadata(self, op: str, value: AttentionMetadata) -> AttentionMetadata:
        names = [one.name for one in fields(value) if one.name != "scratch"]
        return replace(value, **self._inner(op, {name: getattr(value, name) for name in names}))

    def _outer(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return OnGpu(value)
        if isinstance(value, tuple):
            return tuple(self._outer(item) for item in value)
        if callable(value):
            return _Packed(self, value)
        return value


class _Packed:
    """What pack_linear and its like return: a function with methods."""

    def __init__(self, kernels: _Kernels, function: Any):
        self._kernels, self.function = kernels, function
        storages = [tensor.untyped_storage() for tensor in tensors_of(function)]
        self._places = [_gpu.place_of(storage) for storage in storages]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.function, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.function, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: self._call(found, args, kwargs)

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._kernels._inner("a packed layer", (args, kwargs))
        _gpu.clock_ms += 1
        return self._kernels._outer(function(*args, **kwargs))


def _select(kernels: _Kernels, select: Any) -> Any:
    @wraps(select)
    def chosen(device: Any, dtype: Any, overrides: Any = None, **sizes: Any) -> registry.OpTable:
        if torch.device(device).type != "cuda":
            return select(device, dtype, overrides, **sizes)
        pack = (overrides or {}).get("pack_gguf_linear")
        on_cpu = {op: name for op, name in (overrides or {}).items() if "triton" not in name}
        table = select("cpu", dtype, on_cpu, **sizes)
        table.replace("pack_gguf_linear", _with_fp8(table.pack_gguf_linear))
        for op in registry.CONTRACTS:
            table.replace(op, kernels.on_gpu(op, getattr(table, op)))
        table.pack_gguf_linear.takes_fp8 = True  # type: ignore[attr-defined]
        table.pack_gguf_linear.quantizes_to_fp8 = pack != "triton"  # type: ignore[attr-defined]
        table.native.clear()
        return table

    return chosen


def _with_fp8(pack: Any) -> Any:
    """Kernels of GPUs take blocks of FP8; of those for CPUs only the reference does."""
    found = registry.implementations("pack_gguf_linear")
    reference = next(one.function for one in found if one.name == "reference")

    def call(parts: Any, types: list[str], bias: Any, dtype: Any) -> Any:
        has_fp8 = any(type in FP8_TYPES for type in types)
        return (reference if has_fp8 else pack)(parts, types, bias, dtype)

    return call


class _Stream:
    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None)


class _Event:
    def __init__(self, *_: Any, **__: Any):
        self._ms = 0.0

    def record(self, *_: Any) -> None:
        self._ms = _gpu.clock_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        return end._ms - self._ms


class _FakeNccl:
    """A process group of tensors of GPUs."""

    def __init__(self, *args: Any, device: torch.device, **settings: Any):
        assert device == GPU
        self._gloo = make_process_group(*args, **settings)

    def allgather(self, parts: list[list[OnGpu]], mine: list[OnGpu]) -> Any:
        [of_ranks], [own] = parts, mine
        return self._gloo.allgather([[one.held for one in of_ranks]], [own.held.clone()])

    def send(self, tensors: list[OnGpu], to: int, tag: int) -> Any:
        return self._gloo.send([one.held for one in tensors], to, tag)

    def recv(self, tensors: list[OnGpu], of: int, tag: int) -> Any:
        return self._gloo.recv([one.held for one in tensors], of, tag)


def enter_thread() -> None:
    """Gives another thread the GPU, while `fake_gpu` is entered and as long as it lives."""
    _Mode().__enter__()


FREE_BYTES, TOTAL_BYTES = 2**30, 2**31  # of a GPU that other processes use

OF_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "set_device": lambda *_: None,
    "get_device_capability": lambda *_: (9, 0),
    "get_device_name": lambda *_: "a fake GPU",
    "mem_get_info": lambda *_: (FREE_BYTES - _gpu.allocated, TOTAL_BYTES),
    "memory_allocated": lambda *_: _gpu.allocated,
    "max_memory_allocated": lambda *_: _gpu.peak,
    "reset_peak_memory_stats": lambda *_: _gpu.reset_peak(),
    "empty_cache": lambda: None,
    "synchronize": lambda *_: None,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "current_stream": lambda *_: _Stream(),
    "Stream": _Stream,
    "Event": _Event,
    "stream": lambda *_: nullcontext(),
}


def _make_subclass(cls: Any, tensor: torch.Tensor, *others: Any) -> torch.Tensor:
    if not isinstance(tensor, OnGpu):
        return MAKE_SUBCLASS(cls, tensor, *others)
    return type(cls.__name__, (cls, OnGpu), {"__new__": OnGpu.__new__})(tensor.held)


def _as_subclass(tensor: torch.Tensor, cls: Any) -> torch.Tensor:
    return OnGpu(tensor.held) if isinstance(tensor, OnGpu) else AS_SUBCLASS(tensor, cls)


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """torch's own makes a tensor where it believes its argument to be, on the CPU."""
    if isinstance(tensor, OnGpu):
        return OnGpu(ONE_HOT(tensor.held, num_classes))
    return ONE_HOT(tensor, num_classes)


ONE_HOT = torch.nn.functional.one_hot
MAKE_SUBCLASS, AS_SUBCLASS = torch.Tensor._make_subclass, torch.Tensor.as_subclass


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Gives this thread a GPU."""
    global _gpu
    _gpu = FakeGpu()
    registry._default_table.cache_clear()
    with pytest.MonkeyPatch.context() as patch, _Mode():
        for name, value in OF_CUDA.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(registry, "select", _select(_Kernels(), registry.select))
        # a wrapper made within it cannot be a view of one made outside
        patch.setattr(torch.inference_mode, "__enter__", lambda self: None)
        patch.setattr(torch.inference_mode, "__exit__", lambda self, *error: None)
        patch.setattr(torch_links, "make_process_group", _FakeNccl)
        patch.setattr(worker, "CudaCapture", _gpu.capture)
        patch.setattr(device, "use_in_thread", lambda *_: enter_thread())
        patch.setattr(torch.Tensor, "_make_subclass", staticmethod(_make_subclass))
        patch.setattr(torch.Tensor, "as_subclass", _as_subclass)
        patch.setattr(torch.nn.functional, "one_hot", _one_hot)
        yield _gpu
    registry._default_table.cache_clear()
