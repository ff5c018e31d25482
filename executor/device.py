"""The one file with device matters: which device, which dtypes it takes, how many threads, how much memory, where the cache lives.
May know: torch, psutil, the operating system's view of this process (affinity, cgroups).
Must not know: models, requests, who asks."""

from __future__ import annotations

import ctypes
import gc
import math
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.nn.functional as F

from ..ipc.errors import InvalidParameterError

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def select_device(name: str) -> torch.device:
    """ "cpu" -> its torch.device. Raises InvalidParameterError for what is not supported yet, or was left unresolved."""
    if name == "cuda":
        raise InvalidParameterError("device", "cuda is not supported yet; use cpu")
    if name != "cpu":
        raise InvalidParameterError("device", f"must be cpu once the configuration is resolved, got {name!r}")
    return torch.device("cpu")


def select_dtype(name: str, device: torch.device) -> torch.dtype:
    """ "bfloat16" or "float32" -> torch's dtype. Raises InvalidParameterError for a dtype that `device` has no arithmetic for."""
    if name not in _DTYPES:
        raise InvalidParameterError("dtype", f"must be one of {', '.join(_DTYPES)} once the configuration is resolved, got {name!r}")
    if device.type == "cpu" and name == "float16":
        raise InvalidParameterError("dtype", "float16 is not supported on a CPU; use bfloat16 or float32")
    return _DTYPES[name]


def set_num_threads(num_threads: int | None) -> int:
    """Sets how many threads one operation may use and returns the number. None: OMP_NUM_THREADS, or every core of this process."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list gives nested regions theirs; there are none here
    count = num_threads or (int(wanted) if wanted.isdigit() and int(wanted) else available_cores())
    torch.set_num_threads(count)
    return count


def available_cores() -> int:
    """Cores this process may use: its affinity mask, less where a cgroup's CPU quota gives it less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    # More threads than quota would be throttled together: each would wait for the slowest.
    return max(1, min(cores, math.ceil(quota))) if quota is not None else cores


def cgroup_cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of CPU time that this process's cgroups allow (v2 cpu.max, v1 cpu.cfs_*), the tightest one; None: no limit."""
    quotas = []
    for directory in _cgroup_directories(root, "cpu"):
        limit, period = _read(directory / "cpu.max"), None
        if limit is not None:
            limit, _, period = limit.partition(" ")
        else:
            limit, period = _read(directory / "cpu.cfs_quota_us"), _read(directory / "cpu.cfs_period_us")
        if limit not in (None, "max", "-1") and period:
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def cgroup_free_memory(root: Path = Path("/")) -> int | None:
    """Bytes left under the tightest memory limit of this process's cgroups (page cache counted as free); None: no limit."""
    free = []
    for directory in _cgroup_directories(root, "memory"):
        for limit_name, usage_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, usage = _read(directory / limit_name), _read(directory / usage_name)
            if limit not in (None, "max") and usage is not None:
                stat = dict(line.split() for line in (_read(directory / "memory.stat") or "").splitlines())
                reclaimable = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
                free.append(max(0, int(limit) - int(usage) + reclaimable))
    return min(free, default=None)


def _cgroup_directories(root: Path, controller: str) -> list[Path]:
    """The cgroup of this process and its ancestors, in the v2 tree and in the v1 tree of `controller`: a limit on any of them binds."""
    directories = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controllers and controller)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        directories += [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return directories


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def free_memory_bytes() -> int:
    """Memory this process could still take: the machine's, or its cgroup's where that is less."""
    free = psutil.virtual_memory().available
    limit = cgroup_free_memory()
    return free if limit is None else min(free, limit)


def release_memory() -> None:
    """Gives the operating system back what was freed: cyclic garbage, and the pages that malloc keeps for later."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)


def resident_bytes() -> int:
    """Memory that this process has in use now."""
    return psutil.Process().memory_info().rss


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A large zeroed tensor. On a CPU its pages are the kernel's zero pages: memory is taken, and time spent, only where it is written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=dtype).view(shape)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """x [T, in] -> x weight^T + bias [T, out], for weight [out, in] that never changes again.

    On a CPU a bf16 weight is laid out once for oneDNN's matrix units. F.linear does that anew in every call: at T = 1 more than half of
    its time (AMX, one core, 1536 x 256: 55 us against 24). In fp32 the plain layout is as good.
    """
    packable = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if not (packable and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return lambda x: F.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: multiply(x, packed, bias, "none", [], "")


def argmax(logits: torch.Tensor) -> np.ndarray:
    """[R, V] -> [R] i64 on the host: the lowest index of each row's largest element. No NaN may be among them."""
    # On a CPU torch's argmax is scalar code; numpy's uses vector instructions (32 rows of 4096: 8 us against 180).
    return logits.numpy().argmax(-1) if logits.device.type == "cpu" else logits.argmax(-1).numpy(force=True)
