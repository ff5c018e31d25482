"""The cores, memory and descriptors that the operating system gives this process.

Must not know: torch, what they are for.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
from pathlib import Path

from .operating_system import SYSTEM, Darwin, Linux


def available_cores() -> int:
    """Cores this process may use: its affinity mask, capped by its cgroup's CPU quota; on macOS
    the fast ones.
    """
    cores = SYSTEM.num_cores()
    quota = cgroup_cpu_quota()
    # More threads than the quota would be throttled together; each would wait for the slowest.
    return max(1, min(cores, math.ceil(quota))) if quota is not None else cores


def read_cores(text: str) -> list[int]:
    """The numbers in a list such as "0-3,8", in ascending order. Raises ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, is_range, last = part.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not is_range)):
            raise ValueError(f"must be a list of cores such as 0-3,8, got {text!r}")
        cores.update(range(int(first), int(last or first) + 1))
    return sorted(cores)


def numa_cores(root: Path = Path("/")) -> list[list[int]]:
    """The cores that this process may use, by NUMA node. Threads of one core are neighbours. Empty:
    cores have no numbers.
    """
    if not (allowed := SYSTEM.cores()):
        return []
    nodes = []
    for path in sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist")):
        cores = [core for core in read_cores(_read(path) or "") if core in allowed]
        if cores:
            nodes.append(sorted(cores, key=lambda core: (_siblings(core, root)[:1], core)))
    if sum(map(len, nodes)) != len(allowed):  # the system does not say
        return [allowed]
    return nodes


def _siblings(core: int, root: Path) -> list[int]:
    path = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    return read_cores(_read(path) or str(core))


def divide_cores(nodes: list[list[int]], num_parts: int) -> list[list[int]]:
    """Equally many cores for each part, of as few nodes as possible; empty lists if there are fewer
    cores than parts.
    """
    if num_parts % len(nodes) == 0:
        per_node = num_parts // len(nodes)
        size = min(map(len, nodes)) // per_node
        return [node[i * size : (i + 1) * size] for node in nodes for i in range(per_node)]
    every = [core for node in nodes for core in node]
    if len(nodes) % num_parts == 0:
        per_part = len(nodes) // num_parts
        parts = [nodes[i * per_part : (i + 1) * per_part] for i in range(num_parts)]
        return [[core for node in part for core in node] for part in parts]
    size = len(every) // num_parts
    return [every[i * size : (i + 1) * size] for i in range(num_parts)]


def use_cores(cores: list[int]) -> None:
    """Binds all threads of this process, and those that they start, to these cores.

    Raises OSError where the system cannot do it.
    """
    SYSTEM.bind_to_cores(cores)


def visible_gpus(rank: int, number: int, visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES of the process that has the `rank`-th share of `number` GPUs.

    visible: the variable's present value. Raises ValueError if it names too few.
    """
    if visible is None:
        return ",".join(map(str, range(rank * number, (rank + 1) * number)))
    own = visible.split(",")[rank * number : (rank + 1) * number]
    if len(own) < number:
        raise ValueError(f"CUDA_VISIBLE_DEVICES={visible} has no GPUs for engine {rank}")
    return ",".join(own)


def cgroup_cpu_quota(root: Path = Path("/")) -> float | None:
    """The smallest CPU quota of this process's cgroups in cores (v2 cpu.max, v1 cpu.cfs_*); None:
    there is no limit.
    """
    quotas = []
    for directory in _cgroup_directories(root, "cpu"):
        limit, period = _read(directory / "cpu.max"), None
        if limit is not None:
            limit, _, period = limit.partition(" ")
        else:
            limit = _read(directory / "cpu.cfs_quota_us")
            period = _read(directory / "cpu.cfs_period_us")
        if limit not in (None, "max", "-1") and period:
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)


def cgroup_free_memory(root: Path = Path("/")) -> int | None:
    """Bytes left under the smallest memory limit of this process's cgroups, where page cache counts
    as free; None: there is no limit.
    """
    free = []
    for directory in _cgroup_directories(root, "memory"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _read(directory / limit_name), _read(directory / usage_name)
            if limit not in (None, "max") and usage is not None:
                stat = dict(
                    line.split() for line in (_read(directory / "memory.stat") or "").splitlines()
                )
                reclaimable = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
                free.append(max(0, int(limit) - int(usage) + reclaimable))
    return min(free, default=None)


def cgroup_memory_limit(root: Path = Path("/")) -> int | None:
    """The smallest memory limit of this process's cgroups in bytes; None: there is no limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    found = (_read(d / name) for d in _cgroup_directories(root, "memory") for name in names)
    return min((int(limit) for limit in found if limit not in (None, "max")), default=None)


def _cgroup_directories(root: Path, controller: str) -> list[Path]:
    """The cgroup of this process and its ancestors, in the v2 tree and in the v1 tree of
    `controller`.

    A limit on any of them applies.
    """
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
    """Memory this process can still use: the machine's free memory, or its cgroup's if that is
    less.
    """
    free = SYSTEM.available_memory_bytes()
    limit = cgroup_free_memory()
    return free if limit is None else min(free, limit)


def total_memory_bytes() -> int:
    """Memory that this process could ever use: the machine's, or its cgroup's limit if that is
    less.
    """
    total = SYSTEM.total_memory_bytes()
    limit = cgroup_memory_limit()
    return total if limit is None else min(total, limit)


def private_memory_bytes(pid: int) -> int:
    """Memory of a process that it shares with no other, without files that are mapped; on macOS
    all that it has in use.
    """
    return SYSTEM.private_memory_bytes(pid)


def resident_bytes() -> int:
    """Memory that this process has in use now."""
    return SYSTEM.resident_bytes()


def descriptor_limit() -> int:
    """The most descriptors that this process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def raise_descriptor_limit() -> None:
    """Raises it as far as the system allows."""
    most = most_descriptors()
    with contextlib.suppress(OSError, ValueError):  # more than the kernel's own limit
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard if most is None else most, hard))


def most_descriptors(system: Linux | Darwin = SYSTEM) -> int | None:
    """The most that descriptor_limit can be raised to; None: there is no limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limits = (None if hard == resource.RLIM_INFINITY else hard, system.max_descriptors())
    return min((limit for limit in limits if limit is not None), default=None)


def num_open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def num_free_descriptors() -> int:
    return descriptor_limit() - num_open_descriptors()
