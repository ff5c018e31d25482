"""Cores and memory of this process, with the limits of its cgroups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from quire.ipc import machine


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        # the limit of an ancestor applies too
        (
            {
                "proc/self/cgroup": "0::/a/b",
                "sys/fs/cgroup/a/cpu.max": "200000 100000",
                "sys/fs/cgroup/a/b/cpu.max": "300000 100000",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/job\n0::/",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
    ],
)
def test_cgroup_cpu_quota(tmp_path, files, cores):
    assert machine.cgroup_cpu_quota(write(tmp_path, files)) == cores


def test_no_cgroup_means_no_limit(tmp_path):
    assert machine.cgroup_cpu_quota(tmp_path) is None
    assert machine.cgroup_free_memory(tmp_path) is None
    assert machine.cgroup_memory_limit(tmp_path) is None


def test_cgroup_free_memory(tmp_path):
    v2 = {
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/memory.max": "1000",
        "sys/fs/cgroup/job/memory.current": "700",
        "sys/fs/cgroup/job/memory.stat": "anon 500\ninactive_file 150",
        "sys/fs/cgroup/memory.max": "max",
    }
    assert machine.cgroup_free_memory(write(tmp_path / "v2", v2)) == 450
    assert machine.cgroup_memory_limit(tmp_path / "v2") == 1000
    v1 = {
        "proc/self/cgroup": "9:memory:/job",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "900",
    }
    assert machine.cgroup_free_memory(write(tmp_path / "v1", v1)) == 100
    assert machine.cgroup_memory_limit(tmp_path / "v1") == 1000


def test_threads_follow_affinity_and_quota(monkeypatch):
    affinity = len(os.sched_getaffinity(0))
    monkeypatch.setattr(machine, "cgroup_cpu_quota", lambda: None)
    assert machine.available_cores() == affinity
    for quota, cores in ((0.5, 1), (1.0, 1), (1000.0, affinity)):
        monkeypatch.setattr(machine, "cgroup_cpu_quota", lambda quota=quota: quota)
        assert machine.available_cores() == cores


def test_free_memory_is_the_smaller_of_machine_and_cgroup(monkeypatch):
    monkeypatch.setattr(machine, "cgroup_free_memory", lambda: 12345)
    assert machine.free_memory_bytes() == 12345
    monkeypatch.setattr(machine, "cgroup_free_memory", lambda: None)
    assert 0 < machine.free_memory_bytes() <= psutil.virtual_memory().total


def test_all_memory_is_that_of_the_smaller_of_machine_and_cgroup(monkeypatch):
    monkeypatch.setattr(machine, "cgroup_memory_limit", lambda: 12345)
    assert machine.total_memory_bytes() == 12345
    for limit in (None, 2**63):  # v1 writes a number where there is no limit
        monkeypatch.setattr(machine, "cgroup_memory_limit", lambda limit=limit: limit)
        assert machine.total_memory_bytes() == psutil.virtual_memory().total


def test_descriptors_are_counted_and_the_limit_is_raised():
    code = (
        "import os, resource\n"
        "from quire.ipc.machine import *\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))\n"
        "before = num_open_descriptors()\n"
        "os.pipe()\n"
        "assert num_open_descriptors() == before + 2 and descriptor_limit() == 64\n"
        "raise_descriptor_limit()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lists_of_cores() -> None:
    assert machine.read_cores("0-3,8,2\n") == [0, 1, 2, 3, 8]
    assert machine.read_cores("") == []
    for text in ("a", "1-", "-1", "1-b"):
        with pytest.raises(ValueError, match="a list of cores"):
            machine.read_cores(text)


def test_cores_of_numa_nodes(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 6, 7})
    assert machine.numa_cores(tmp_path) == [[0, 1, 2, 4, 5, 6, 7]]  # the system does not tell
    siblings = {
        f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}"
        for i in range(8)
    }
    nodes = {
        "sys/devices/system/node/node0/cpulist": "0-1,4-5",
        "sys/devices/system/node/node1/cpulist": "2-3,6-7",
    }
    write(tmp_path, nodes | siblings)
    assert machine.numa_cores(tmp_path) == [[0, 4, 1, 5], [2, 6, 7]]


@pytest.mark.parametrize(
    ("nodes", "number", "parts"),
    [
        ([[0, 1]], 2, [[0], [1]]),
        ([[0, 1, 2]], 2, [[0], [1]]),
        ([[0]], 2, [[], []]),
        ([[0, 1], [2, 3]], 2, [[0, 1], [2, 3]]),
        ([[0, 1], [2, 3, 4]], 2, [[0, 1], [2, 3]]),
        ([[0, 1], [2, 3], [4, 5], [6, 7]], 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([[0, 1], [2, 3]], 3, [[0], [1], [2]]),
        ([[0, 1], [2, 3]], 4, [[0], [1], [2], [3]]),
    ],
)
def test_cores_are_divided_by_node(nodes, number, parts) -> None:
    assert machine.divide_cores(nodes, number) == parts


def test_a_process_keeps_to_its_cores() -> None:
    code = (
        "import os, threading; from quire.ipc.machine import use_cores\n"
        "waiting = threading.Event(); thread = threading.Thread(target=waiting.wait)\n"
        "thread.start(); core = min(os.sched_getaffinity(0)); use_cores([core])\n"
        "tasks = {frozenset(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')}\n"
        "waiting.set(); print(tasks == {frozenset([core])})"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n"


@pytest.mark.parametrize(
    ("rank", "number", "visible", "own"),
    [(0, 1, None, "0"), (1, 2, None, "2,3"), (1, 1, "5,7", "7"), (1, 2, "1,3,5,7", "5,7")],
)
def test_gpus_of_an_engine(rank, number, visible, own) -> None:
    assert machine.visible_gpus(rank, number, visible) == own
    with pytest.raises(ValueError, match="no GPUs for engine 2"):
        machine.visible_gpus(2, 1, "0,1")
