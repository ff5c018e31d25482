"""Each check of the machine passes, warns and fails as it should, and says what to do."""

from __future__ import annotations

import ctypes
import resource
import socket
import tomllib
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest
from packaging.specifiers import SpecifierSet
from quire.frontend.diagnosis import machine as diagnosis
from quire.frontend.diagnosis.machine import GIB, Finding, check_machine
from quire.frontend.model_info import cpu
from quire.ipc.operating_system import Linux

ROOT = Path(__file__).resolve().parents[3]


def test_this_machine_can_be_diagnosed() -> None:
    findings = list(check_machine("127.0.0.1", 0, 10))
    names = [finding.name for finding in findings]
    for name in (
        "python",
        "libraries",
        "processor",
        "native kernels",
        "cores",
        "memory",
        "swap",
        "gpu",
        "port",
        "open files",
        "temporary files",
        "sockets",
        "hub cache",
        "hub",
    ):
        assert name in names
    assert all(finding.detail for finding in findings)
    assert [finding for finding in findings if finding.status != "pass" and not finding.fix] == []


def test_python() -> None:
    """The versions that doctor accepts are those that pip accepts."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = SpecifierSet(project["requires-python"])
    for minor in range(9, 17):
        expected = "pass" if f"3.{minor}.1" in allowed else "fail"
        assert diagnosis.check_python((3, minor)).status == expected, minor


def packages(
    monkeypatch: pytest.MonkeyPatch, needed: list[str] | None, installed: dict[str, str]
) -> list[Finding]:
    def requires(name: str) -> list[str] | None:
        if needed is None:
            raise metadata.PackageNotFoundError(name)
        return needed

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "requires", requires)
    monkeypatch.setattr(metadata, "version", version)
    return list(diagnosis.check_packages())


def test_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = [
        "torch<2.14,>=2.11",
        "pyzmq>=26",
        "pytest; extra == 'test'",
        "winreg; platform_system == 'Windows'",
    ]
    assert packages(monkeypatch, needed, {"torch": "2.13.0+cpu", "pyzmq": "27.0"}) == [
        Finding("libraries", "pass", "torch 2.13.0+cpu, pyzmq 27.0")
    ]
    first, _ = packages(monkeypatch, needed, {"torch": "2.9.0", "pyzmq": "27.0"})
    assert first == Finding(
        "torch", "fail", "is 2.9.0, Quire requires <2.14,>=2.11", "pip install 'torch<2.14,>=2.11'"
    )
    assert packages(monkeypatch, needed, {"torch": "2.13.0"})[0] == Finding(
        "pyzmq", "fail", "is missing", "pip install 'pyzmq>=26'"
    )
    assert [finding.status for finding in packages(monkeypatch, None, {})] == ["warn"]


@pytest.mark.parametrize(
    ("cpuinfo", "status", "words"),
    [
        (
            "model name\t: Xeon\nflags\t\t: fma avx2 avx512f avx512_bf16 amx_bf16",
            "pass",
            "Xeon: amx_bf16, avx512_bf16, avx512f, avx2, fma; native bfloat16",
        ),
        (
            "model name\t: EPYC\nflags\t\t: fma avx2",
            "pass",
            "EPYC: avx2, fma; no native bfloat16, so dtype=auto is ",
        ),
        ("model name\t: QEMU\nflags\t\t: sse2", "warn", "QEMU: no known vector instructions"),
        ("Features\t: fp asimd bf16 i8mm", "pass", "bf16, i8mm, asimd"),
    ],
)
def test_processor(
    cpuinfo: str, status: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo + "\n")
    monkeypatch.setattr(Linux, "processor_file", tmp_path / "cpuinfo")
    finding = diagnosis.check_cpu()
    assert finding.status == status and words in finding.detail


AVX512 = "fma avx2 avx512f avx512bw avx512vl avx512dq avx512_vnni avx512_bf16"


@pytest.mark.parametrize(
    ("flags", "wanted", "is_built", "status", "words"),
    [
        (
            f"{AVX512} amx_tile amx_bf16 amx_int8",
            "auto",
            True,
            "pass",
            "amx (of amx, avx512_bf16, avx512, avx2)",
        ),
        # the system does not provide tiles
        (f"{AVX512} amx_bf16", "auto", True, "pass", "avx512_bf16 (of avx512_bf16, avx512, avx2)"),
        (
            f"{AVX512} amx_tile amx_bf16 amx_int8",
            "avx2",
            True,
            "pass",
            "avx2 (of amx, avx512_bf16, avx512, avx2)",
        ),
        (AVX512.removesuffix(" avx512_bf16"), "auto", True, "pass", "avx512 (of avx512, avx2)"),
        ("fma avx2 avx512f", "avx512", True, "fail", "this processor does not support avx512"),
        ("fma avx2", "none", True, "pass", "disabled"),
        ("fma avx2", "auto", False, "warn", "not built"),
        ("sse2", "auto", True, "pass", "none for this processor"),
    ],
)
def test_native_kernels(
    flags: str,
    wanted: str,
    is_built: bool,
    status: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
    if is_built:
        (tmp_path / "_native.so").touch()
    monkeypatch.setattr(Linux, "processor_file", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu, "NATIVE_KERNELS", tmp_path)
    monkeypatch.delenv("QUIRE_NATIVE", raising=False)
    finding = diagnosis.check_kernels(wanted)
    assert (
        finding.status == status
        and words in finding.detail
        and (status == "pass") == (not finding.fix)
    )


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "available_cores", lambda: 2)
    monkeypatch.setattr(diagnosis, "cgroup_cpu_quota", lambda: 1.5)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (0.5, 0, 0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    finding = diagnosis.check_cores()
    assert (
        finding.status == "pass"
        and finding.detail.startswith("2 for Quire: ")
        and "quota 1.5, load 0.5" in finding.detail
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "8,1")
    assert diagnosis.check_cores().fix == "OMP_NUM_THREADS=2, or none"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(psutil, "getloadavg", lambda: (9.0, 0, 0))
    assert diagnosis.check_cores().status == "warn"


@pytest.mark.parametrize(("free", "status"), [(GIB // 4, "fail"), (GIB, "warn"), (8 * GIB, "pass")])
def test_memory(free: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "free_memory_bytes", lambda: free)
    monkeypatch.setattr(diagnosis, "cgroup_free_memory", lambda: free)
    finding = diagnosis.check_memory()
    assert finding.status == status and f"{free / GIB:.1f} GiB left in the cgroup" in finding.detail
    # cgroup v1's value for "none"
    monkeypatch.setattr(diagnosis, "cgroup_free_memory", lambda: 2**63 - 4096)
    assert "no cgroup limit" in diagnosis.check_memory().detail


@pytest.mark.parametrize(
    ("total", "used", "status"), [(0, 0, "pass"), (8, 1, "pass"), (8, 3, "warn")]
)
def test_swap(total: int, used: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Swap = namedtuple("Swap", "total used")
    monkeypatch.setattr(psutil, "swap_memory", lambda: Swap(total * GIB, used * GIB))
    assert diagnosis.check_swap().status == status


class Driver:
    """The functions of libcuda that the check calls."""

    def __init__(self, code: int = 0, names: tuple[bytes, ...] = ()):
        self.code, self.names = code, names

    def cuInit(self, flags: int) -> int:
        return self.code

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 12080
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.names)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = self.names[device.value]
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: Any) -> int:
        size._obj.value = 80 * GIB
        return 0


def test_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(
        diagnosis, "Path", lambda name: Path("/nowhere") if name == "/dev/nvidiactl" else Path(name)
    )
    monkeypatch.setattr(ctypes, "CDLL", none)
    assert diagnosis.check_gpu() == Finding("gpu", "pass", "none; the model runs on the CPU")
    monkeypatch.setattr(diagnosis, "Path", lambda name: Path("/dev/null"))
    assert diagnosis.check_gpu().status == "warn" and "--gpus all" in diagnosis.check_gpu().fix
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(code=100))
    assert "cuInit fails with error 100" in diagnosis.check_gpu().detail
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert diagnosis.check_gpu().status == "pass"
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(names=(b"Some GPU", b"Other GPU")))
    for has_cuda, triton in ((False, "triton"), (True, None)):
        monkeypatch.setattr(diagnosis, "torch_has_cuda", lambda has_cuda=has_cuda: has_cuda)
        monkeypatch.setattr(diagnosis, "find_spec", lambda name, triton=triton: triton)
        finding = diagnosis.check_gpu()
        assert finding.status == "warn" and "not used: PyTorch is" in finding.detail
    monkeypatch.setattr(diagnosis, "find_spec", lambda name: name)
    finding = diagnosis.check_gpu()
    assert finding.status == "pass" and finding.detail.startswith(
        "Some GPU (80 GiB), Other GPU (80 GiB); driver for CUDA 12.8;"
    )


def test_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = diagnosis.check_port("127.0.0.1", port)
        assert (
            finding.status == "fail"
            and f"--port {port + 1}" in finding.fix
            and "Address already in use" in finding.detail
        )
    assert diagnosis.check_port("127.0.0.1", port).status == "pass"
    assert diagnosis.check_port("127.0.0.1", 0).status == "pass"
    assert "--host" in diagnosis.check_port("no-such-host.invalid", 1).fix


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    assert diagnosis.check_open_files(3712).status == "pass"  # a server raises the soft limit
    assert diagnosis.check_open_files(3713) == Finding(
        "open files",
        "warn",
        "the hard limit of 4096 allows 3712 connections, max_connections=3713 needs 4097 files",
        "raise the hard limit to 4097 (limits.conf, LimitNOFILE), or --max-connections 3712",
    )
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert diagnosis.check_open_files(10**6).status == "pass"


def test_disks_and_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    Usage = namedtuple("Usage", "free")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda path: Usage(GIB))
    findings = {finding.name: finding for finding in diagnosis.check_disks()}
    assert findings["temporary files"].status == "pass"
    assert findings["hub cache"].status == "warn" and findings["hub cache"].detail.endswith(
        "1.0 GiB free, not created yet"
    )
    monkeypatch.setattr(diagnosis.os, "access", lambda path, mode: False)
    findings = {finding.name: finding for finding in diagnosis.check_disks()}
    assert findings["temporary files"].status == "fail"
    assert findings["hub cache"].status == "warn"
    assert findings["sockets"].status == "pass"
    monkeypatch.setattr("zmq.has", lambda capability: False)
    findings = {finding.name: finding for finding in diagnosis.check_disks()}
    assert findings["sockets"].status == "fail" and "CURVE" in findings["sockets"].detail
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "offline" in diagnosis.check_hub().detail
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert "HF_HUB_OFFLINE=1" in diagnosis.check_hub().detail
