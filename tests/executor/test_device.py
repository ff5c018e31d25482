"""Device, dtypes, threads and memory as the executor sees them.
May know: device.py, a made-up file tree in place of /proc and /sys.
Must not know: models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from quire.executor import device as devices
from quire.ipc.errors import InvalidParameterError

CPU = torch.device("cpu")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def test_cuda_is_refused_in_one_sentence():
    with pytest.raises(InvalidParameterError) as caught:
        devices.select_device("cuda")
    assert str(caught.value) == "device: cuda is not supported yet; use cpu"
    assert devices.select_device("cpu") == CPU


@pytest.mark.parametrize(("own", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_sleep_when_idle_unless_the_user_says_otherwise(own, policy):
    """OpenMP reads the policy when torch is imported, so the package must set it before."""
    program = "import os, sys; import quire.executor; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    result = subprocess.run([sys.executable, "-c", program], env=environment | own, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [policy, "False"]


@pytest.mark.parametrize("name", ["auto", "tpu"])
def test_unresolved_values_are_refused(name):
    with pytest.raises(InvalidParameterError, match="device: must be cpu"):
        devices.select_device(name)
    with pytest.raises(InvalidParameterError, match="dtype: must be one of"):
        devices.select_dtype(name, CPU)


def test_dtypes():
    assert devices.select_dtype("bfloat16", CPU) == torch.bfloat16
    assert devices.select_dtype("float32", CPU) == torch.float32
    with pytest.raises(InvalidParameterError, match="float16 is not supported on a CPU"):
        devices.select_dtype("float16", CPU)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        # the limit of an ancestor binds as well
        ({"proc/self/cgroup": "0::/a/b", "sys/fs/cgroup/a/cpu.max": "200000 100000", "sys/fs/cgroup/a/b/cpu.max": "300000 100000"}, 2.0),
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
    assert devices.cgroup_cpu_quota(write(tmp_path, files)) == cores


def test_no_cgroups_no_limit(tmp_path):
    assert devices.cgroup_cpu_quota(tmp_path) is None
    assert devices.cgroup_free_memory(tmp_path) is None


def test_cgroup_free_memory(tmp_path):
    v2 = {
        "proc/self/cgroup": "0::/job",
        "sys/fs/cgroup/job/memory.max": "1000",
        "sys/fs/cgroup/job/memory.current": "700",
        "sys/fs/cgroup/job/memory.stat": "anon 500\ninactive_file 150",
        "sys/fs/cgroup/memory.max": "max",
    }
    assert devices.cgroup_free_memory(write(tmp_path / "v2", v2)) == 450
    v1 = {
        "proc/self/cgroup": "9:memory:/job",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "1000",
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "900",
    }
    assert devices.cgroup_free_memory(write(tmp_path / "v1", v1)) == 100


def test_threads_follow_affinity_and_quota(monkeypatch):
    affinity = len(os.sched_getaffinity(0))
    monkeypatch.setattr(devices, "cgroup_cpu_quota", lambda: None)
    assert devices.available_cores() == affinity
    for quota, cores in ((0.5, 1), (1.0, 1), (1000.0, affinity)):
        monkeypatch.setattr(devices, "cgroup_cpu_quota", lambda quota=quota: quota)
        assert devices.available_cores() == cores


def test_set_num_threads(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        assert devices.set_num_threads(2) == torch.get_num_threads() == 2
        assert devices.set_num_threads(None) == torch.get_num_threads() == devices.available_cores()
        monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
        assert devices.set_num_threads(None) == torch.get_num_threads() == 3
        assert devices.set_num_threads(1) == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_free_memory_is_the_tighter_of_machine_and_cgroup(monkeypatch):
    monkeypatch.setattr(devices, "cgroup_free_memory", lambda: 12345)
    assert devices.free_memory_bytes() == 12345
    monkeypatch.setattr(devices, "cgroup_free_memory", lambda: None)
    assert 0 < devices.free_memory_bytes() <= psutil.virtual_memory().total


def test_zeros_takes_memory_only_where_written():
    resident = psutil.Process().memory_info().rss
    tensor = devices.zeros((2, 2**20, 64), torch.bfloat16, CPU)  # 256 MiB
    assert psutil.Process().memory_info().rss - resident < 2**26
    tensor[1, -1] = 1.0
    assert tensor.shape == (2, 2**20, 64) and tensor.is_contiguous() and tensor[1, -2:].sum() == 64


def test_argmax_takes_the_first_of_equals():
    logits = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0))
    logits[3] = 1.0
    logits[4, [5, 600]] = 50.0
    assert devices.argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert devices.argmax(logits)[3:5].tolist() == [0, 5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_packed_linear_multiplies_as_linear(dtype, num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    bias = torch.randn(96, generator=generator).to(dtype)
    x = torch.randn(num_tokens, 64, generator=generator).to(dtype)
    with torch.inference_mode():
        for b in (bias, None):
            torch.testing.assert_close(devices.pack_linear(weight, b)(x), F.linear(x, weight, b))
