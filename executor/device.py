"""The one file that knows the device: which one it is, which dtypes it takes, how many threads it
has, where the cache lives.

Must not know: models, requests, who asks.
"""

from __future__ import annotations

import gc
import math
import mmap
import os
from collections.abc import Callable, Mapping

import numpy as np
import torch

from ..ipc import platform_tuning
from ..ipc.config import EngineConfig, resolved
from ..ipc.errors import InvalidParameterError
from ..ipc.machine import (
    available_cores,
    free_memory_bytes,
    private_memory_bytes,
    total_memory_bytes,
)
from ..ipc.models.memory_plan import free_of_share
from ..ipc.models.ranks import num_ranks
from ..kernels import registry
from ..kernels.cpu.native.library import library

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def select_device(name: str) -> torch.device:
    """ "cpu" or "cuda" -> its torch.device.

    Raises InvalidParameterError for a device that this machine lacks, and for an unresolved name.
    """
    if name not in ("cpu", "cuda"):
        raise InvalidParameterError(
            "device", f"must be cpu or cuda once the configuration is resolved, got {name!r}"
        )
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        lacking = (
            f"PyTorch {torch.__version__} is built without CUDA"
            if torch.version.cuda is None
            else "PyTorch finds no NVIDIA GPU"
        )
        raise InvalidParameterError(
            "device", f"cuda: {lacking} (quire doctor says what is here); use cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def import_kernels(device: str) -> None:
    """Imports the kernels for "cpu" or "cuda", without the use of the device."""
    registry.import_implementations(device)


def use_gpu_of_rank(config: EngineConfig, rank: int) -> None:
    """Makes GPU number `rank` the one that `select_device` returns. Each of several engines sees
    only its own GPUs (core/engine_proc.py, take_share).

    Raises InvalidParameterError if there are fewer GPUs than ranks.
    """
    select_device("cuda")  # raises its error where there is none
    size, count = num_ranks(config), torch.cuda.device_count()
    if size > count:
        raise InvalidParameterError(
            "tensor_parallel_size",
            f"each of the {size} ranks (tensor_parallel_size * pipeline_parallel_size) needs a GPU "
            f"of this machine, PyTorch finds {count}",
        )
    torch.cuda.set_device(rank)


def gpu_name(device: torch.device) -> str:
    """The model of a GPU, such as "NVIDIA H100 80GB HBM3"."""
    return torch.cuda.get_device_name(device)


def use_in_thread(device: torch.device) -> None:
    """Makes `device` the one that a new thread computes on, where it is a GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def select_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "bfloat16" or "float32" -> torch's dtype.

    Raises InvalidParameterError for a dtype that `device` has no arithmetic for.
    """
    if name not in _DTYPES:
        raise InvalidParameterError(
            "dtype",
            f"must be one of {', '.join(_DTYPES)} once the configuration is resolved, got {name!r}",
        )
    if device.type == "cpu" and name == "float16":
        raise InvalidParameterError(
            "dtype", "float16 is not supported on a CPU; use bfloat16 or float32"
        )
    return _DTYPES[name]


def capability(device: torch.device) -> int:
    """Returns a GPU's compute capability, 90 for 9.0; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def select_kv_cache_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """ "auto", "fp8" or "int8" -> torch's dtype.

    Raises InvalidParameterError for a GPU that has no instructions for fp8.
    """
    if name == "auto":
        return dtype
    if name == "int8":
        return torch.int8
    if device.type == "cuda" and (has := capability(device)) < 89:
        raise InvalidParameterError(
            "kv_cache_dtype",
            f"fp8 needs a GPU of compute capability 8.9 or newer (Ada, Hopper), this one has "
            f"{has // 10}.{has % 10}; use auto",
        )
    return torch.float8_e4m3fn


def select_cpu_isa(name: str) -> str:
    """Chooses the instruction set of the native kernels and returns its name; "none" where torch's
    kernels serve in their place.

    The choice holds for the whole process: engines that already run in it go on with this set.
    Raises InvalidParameterError for a set that this machine or this build lacks.
    """
    if name == "none" or (library is None and name == "auto"):
        return "none"
    if library is None:
        raise InvalidParameterError(
            "cpu_isa",
            f"{name} needs the native kernels, which are not available here; use auto or none",
        )
    if name not in ("auto", *library.isas):
        raise InvalidParameterError(
            "cpu_isa", f"this processor has no {name}; it has {', '.join(library.isas)}"
        )
    library.use_isa(library.isas[0] if name == "auto" else name)
    return resolved(library.isa)


def set_num_threads(num_threads: int | None) -> int:
    """Sets how many threads one operation may use and returns the number.

    None stands for OMP_NUM_THREADS, or else for every core of this process.
    """
    # the later numbers of a list are for nested regions, of which there are none here
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    count = num_threads or (int(wanted) if wanted.isdigit() and int(wanted) else available_cores())
    torch.set_num_threads(count)
    if library is not None:
        library.set_num_threads(count)
    return count


def wake_threads() -> None:
    """Announces a step, so that threads of native kernels that fell asleep wake up while it is
    prepared.
    """
    if library is not None:
        library.wake()


def release_memory() -> None:
    """Gives the operating system back what was freed: cyclic garbage, and the pages that malloc and
    torch's allocator for GPUs keep for later.
    """
    # core/engine_proc.py and a server freeze what start-up has made, including the model
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()
    platform_tuning.trim_heap()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def copy_mapped(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Copies `values`, of any dtype, into `tensor`, and then gives them up; see release_mapped."""
    tensor.copy_(values)
    release_mapped(values)


def release_mapped(tensor: torch.Tensor) -> None:
    """Gives back the whole pages of a contiguous tensor that lies in a private mapping of a file
    and was only read. The system reads the pages again if anyone looks at them. In any other
    memory, what was written would be lost.
    """
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        platform_tuning.drop_pages(start, end - start)


def free_bytes(device: torch.device) -> int:
    """Free memory of the device."""
    return free_memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def total_bytes(device: torch.device) -> int:
    """All memory of the device that this process could use."""
    return total_memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]


def free_host_bytes(*, has_standby: bool) -> int:
    """Free memory of the host, without what a standby of this process will take. A standby has
    weights of its own, and touches its KV cache only when this process is gone.
    """
    return free_memory_bytes() - (private_memory_bytes(os.getpid()) if has_standby else 0)


def free_share_bytes(device: torch.device, share: float) -> int:
    """What is free of `share` of a GPU's memory. Memory that others have in use counts as used.

    The result can be negative.
    """
    torch.cuda.empty_cache()
    return free_of_share(*torch.cuda.mem_get_info(device), share)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was told to.

    Only code that measures times calls it, and copies whose memory the host uses next: nothing else
    should wait.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device, function: Callable[[], object]) -> int:
    """Memory of a GPU that `function` takes for itself at most."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    function()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A large zeroed tensor in host memory. It is pinned where `device` itself copies from and to
    it.
    """
    return (
        zeros(shape, dtype, torch.device("cpu"))
        if device.type == "cpu"
        else torch.zeros(shape, dtype=dtype, pin_memory=True)
    )


def zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, huge_pages: bool = False
) -> torch.Tensor:
    """A large zeroed tensor.

    On a CPU its pages are the kernel's zero pages: only the pages that are written take memory and
    time. huge_pages: they are of 2 MiB where the system has such.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    if huge_pages and hasattr(mmap, "MAP_PRIVATE"):  # shared memory has none
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        platform_tuning.use_huge_pages(memory)
    else:
        memory = mmap.mmap(-1, num_bytes)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def use_small_pages(part: torch.Tensor) -> None:
    """Pages of this contiguous part of `zeros(..., huge_pages=True)` are not huge."""
    if part.device.type == "cpu":
        platform_tuning.use_small_pages(part.data_ptr(), part.nbytes)


ALIGNMENT = 16  # bytes: what a kernel loads at once


def packed(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns the arrays [N], i32 or i64, on `device`. One copy brings them there, and nobody waits
    for it: PyTorch keeps pinned memory until a copy from it is over.
    """
    starts, num_bytes = [], 0
    for array in arrays.values():
        starts.append(num_bytes)
        num_bytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = host.numpy()
    for start, array in zip(starts, arrays.values()):
        memory[start : start + array.nbytes].view(array.dtype)[:] = array
    there = host.to(device, non_blocking=True)
    whole = {
        np.dtype(np.int32): there.view(torch.int32),
        np.dtype(np.int64): there.view(torch.int64),
    }
    firsts = [start // array.itemsize for start, array in zip(starts, arrays.values())]
    return {
        name: whole[array.dtype][first : first + len(array)]
        for first, (name, array) in zip(firsts, arrays.items())
    }


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns what a tensor in host memory holds on `device`: the tensor itself on a CPU. Nobody
    waits for the copy, as in `packed`.
    """
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


# Begins to bring a tensor, which nobody writes to again, to host memory. Returns a function that
# waits until it is there and returns it.
CopyToHost = Callable[[torch.Tensor], Callable[[], np.ndarray]]


class SecondStream:
    """The CopyToHost of a GPU. A stream of its own copies to pinned memory, while the first stream
    goes on with the next step.

    first stream    [ step N: …, tokens ][ step N + 1: … ]
    second stream            waits for ──▶[ tokens to the host ] event ──▶ whoever asks for them
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, values: torch.Tensor) -> Callable[[], np.ndarray]:
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(values, non_blocking=True)
        # torch does not give the memory to the next step before the copy is over
        values.record_stream(self._stream)
        is_there = self._stream.record_event()

        def wait() -> np.ndarray:
            is_there.synchronize()
            return host.numpy()

        return wait
