"""Checks of the machine: processor, cores, memory, GPU, libraries, port, disks, limits. Each
returns a Finding with advice.

Must not know: torch, a model, how findings are printed.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from ... import shadowed_package
from ...ipc.errors import QuireError
from ...ipc.machine import (
    available_cores,
    cgroup_cpu_quota,
    cgroup_free_memory,
    free_memory_bytes,
    most_descriptors,
)
from ...ipc.operating_system import SYSTEM
from ..model_info.choose_device import torch_has_cuda
from ..model_info.cpu import (
    NATIVE_BFLOAT16,
    are_kernels_built,
    native_isas,
    prefers_bfloat16,
    read_processor,
)
from ..model_info.gpu_memory import CUDA_LIBRARY

GIB = 2**30
OLDEST_PYTHON, NEWEST_PYTHON = (3, 11), (3, 14)  # matches requires-python in pyproject.toml
# Processor features that the kernels use, best first. The first line that applies describes how the
# model's matrices are multiplied.
X86_FEATURES = (
    "amx_bf16",
    "amx_int8",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "avx512f",
    "avx2",
    "fma",
)
ARM_FEATURES = ("bf16", "i8mm", "asimddp", "asimd")
DISTRIBUTION = "quire-engine"  # as in pyproject.toml


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    status: Literal["pass", "warn", "fail"]
    detail: str
    fix: str = ""


def passed(name: str, detail: str) -> Finding:
    return Finding(name, "pass", detail)


def warning(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "warn", detail, fix)


def failure(name: str, detail: str, fix: str) -> Finding:
    return Finding(name, "fail", detail, fix)


def check_machine(
    host: str, port: int, max_connections: int, cpu_isa: str = "auto"
) -> Iterator[Finding]:
    """Makes all checks, in display order."""
    yield check_python()
    yield from check_packages()
    yield check_cpu(cpu_isa)
    yield check_kernels(cpu_isa)
    yield check_cores()
    yield check_memory()
    yield check_swap()
    yield check_gpu()
    yield check_port(host, port)
    yield check_open_files(max_connections)
    yield from check_disks()
    yield check_hub()


# ------------------------------------------------------------ software


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    detail = f"{platform.python_version()} at {sys.executable}"
    if OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        return passed("python", detail)
    return failure("python", detail, "Quire supports Python 3.11 to 3.14")


def check_packages() -> Iterator[Finding]:
    """Checks that the libraries that Quire requires have the required versions. Nothing is
    imported.
    """
    from packaging.requirements import Requirement

    if (other := shadowed_package()) is not None:
        yield warning(
            "package",
            f"the folder quire in {Path(other).parent} is hidden by the one that this program uses",
            "run the program from another folder, or rename the folder",
        )
    try:
        requirements = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        yield warning(
            "libraries",
            f"{DISTRIBUTION} is not installed as a package, so the required versions are unknown",
            "pip install -e .",
        )
        return
    found, problems = [], []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            problems.append((requirement, "is missing"))
            continue
        found.append(f"{requirement.name} {version}")
        if version not in requirement.specifier and not requirement.specifier.contains(
            version.split("+")[0], prereleases=True
        ):
            problems.append((requirement, f"is {version}, Quire requires {requirement.specifier}"))
    for requirement, problem in problems:
        yield failure(
            requirement.name,
            problem,
            f"pip install '{requirement.name}{requirement.specifier}'",
        )
    yield passed("libraries", ", ".join(found))


# ------------------------------------------------------------ processor and memory


def check_cpu(cpu_isa: str = "auto") -> Finding:
    name, present = read_processor()
    features = [name for name in X86_FEATURES + ARM_FEATURES if name in present]
    detail = f"{name}: {', '.join(features) or 'no known vector instructions'}"
    if NATIVE_BFLOAT16 & present:
        return passed("processor", f"{detail}; native bfloat16")
    if not {"avx2", "asimd"} & present:
        return warning(
            "processor",
            detail,
            "Quire is slow without AVX2; use another machine or another type of virtual CPU",
        )
    dtype = "bfloat16, by native kernels" if prefers_bfloat16(cpu_isa) else "float32"
    return passed("processor", f"{detail}; no native bfloat16, so dtype=auto is {dtype}")


def check_kernels(cpu_isa: str) -> Finding:
    """Tells whether the native kernels were built, and which instruction set they would use.

    It does not load the library, because that requires torch.
    """
    isas = native_isas()
    if cpu_isa == "none":
        return passed(
            "native kernels",
            "disabled (cpu_isa=none): torch's kernels are used, several times slower for small "
            "models",
        )
    if cpu_isa != "auto" and cpu_isa not in isas:
        return failure(
            "native kernels",
            f"this processor does not support {cpu_isa}",
            f"--cpu-isa {isas[0] if isas else 'none'}, or leave the flag out",
        )
    if not isas:
        return passed(
            "native kernels",
            "none for this processor (they need aarch64 or x86 with AVX2): torch's kernels are "
            "used",
        )
    if not are_kernels_built():
        fix = "install a C++ compiler (apt install g++), then Quire again (pip install -e .)"
        return warning(
            "native kernels",
            "not built: torch's kernels are used, several times slower for small models",
            fix,
        )
    return passed(
        "native kernels", f"{isas[0] if cpu_isa == 'auto' else cpu_isa} (of {', '.join(isas)})"
    )


def check_cores() -> Finding:
    cores, total = available_cores(), psutil.cpu_count() or 1
    affinity = SYSTEM.num_cores()
    quota = cgroup_cpu_quota()
    load = psutil.getloadavg()[0]
    detail = (
        f"{cores} for Quire: {affinity} of {total} by affinity, cgroup quota "
        f"{'none' if quota is None else f'{quota:g}'}, load {load:.1f}"
    )
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdigit() and int(wanted) > cores:
        return warning(
            "cores",
            f"{detail}; OMP_NUM_THREADS={wanted} is higher",
            f"OMP_NUM_THREADS={cores}, or none",
        )
    if load > total + 1:
        return warning(
            "cores",
            f"{detail}: other programs need more cores than available",
            "stop them, or reserve cores for Quire (taskset)",
        )
    return passed("cores", detail)


def check_memory() -> Finding:
    memory, limit, free = psutil.virtual_memory(), cgroup_free_memory(), free_memory_bytes()
    bound = (
        "no cgroup limit"
        if limit is None or limit > memory.total
        else f"{limit / GIB:.1f} GiB left in the cgroup"
    )
    detail = f"{memory.total / GIB:.1f} GiB, {memory.available / GIB:.1f} available, {bound}"
    if free < GIB // 2:
        return failure(
            "memory",
            detail,
            "the engine takes 0.3 GiB before any model: free memory, or raise the container's "
            "limit",
        )
    if free < 2 * GIB:
        return warning("memory", detail, "only small models fit; see quire plan MODEL")
    return passed("memory", detail)


def check_swap() -> Finding:
    swap = psutil.swap_memory()
    detail = f"{swap.total / GIB:.1f} GiB, {swap.used / GIB:.1f} used"
    if swap.total and swap.used > swap.total / 4:
        return warning(
            "swap",
            detail,
            "swapped-out weights or cache slow down every step: free memory, or swapoff -a && "
            "swapon -a",
        )
    return passed("swap", detail)


def check_gpu() -> Finding:
    """Queries NVIDIA's driver directly; torch is not needed."""
    try:
        cuda = ctypes.CDLL(CUDA_LIBRARY)
    except OSError:
        nodes = Path("/dev/nvidiactl").exists()
        if nodes:
            return warning(
                "gpu",
                "there is an NVIDIA GPU, but its library libcuda was not found",
                "make the driver available in the container (--gpus all)",
            )
        return passed("gpu", "none; the model runs on the CPU")
    code, names, version = cuda.cuInit(0), [], ctypes.c_int()
    if code:
        return warning(
            "gpu",
            f"libcuda was found, but cuInit fails with error {code}",
            "run nvidia-smi for the cause",
        )
    count = ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        name, device, size = ctypes.create_string_buffer(128), ctypes.c_int(), ctypes.c_size_t()
        cuda.cuDeviceGet(ctypes.byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device)
        names.append(f"{name.value.decode()} ({size.value / GIB:.0f} GiB)")
    detail = (
        f"{', '.join(names) or 'none'}; driver for CUDA "
        f"{version.value // 1000}.{version.value % 1000 // 10}"
    )
    if not names:
        return passed("gpu", detail)
    if not torch_has_cuda() or find_spec("triton") is None:
        return warning(
            "gpu",
            f"{detail}; not used: PyTorch is built without CUDA, or Triton is missing",
            "install the build of torch for CUDA, which brings Triton, or leave it: the model runs "
            "on the CPU",
        )
    return passed("gpu", f"{detail}; a model that has room there runs there")


# ------------------------------------------------------------ port, files, hub


def check_port(host: str, port: int) -> Finding:
    if port == 0:
        return passed("port", "any free one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        fix = (
            "set --host to an address of this machine"
            if isinstance(error, socket.gaierror)
            else f"--port {port + 1}, or end the process that uses it (ss -ltnp)"
        )
        return failure("port", f"{host}:{port} is not available: {error.strerror or error}", fix)
    return passed("port", f"{host}:{port} is free")


def check_open_files(max_connections: int) -> Finding:
    """Checks the limit of open files. A server raises the soft limit itself, and takes fewer
    connections below the hard one.
    """
    from ..server.config import connections_within, most_files

    hard = most_descriptors()
    if hard is None:
        return passed("open files", "no limit")
    allowed, needed = connections_within(max_connections, hard), most_files(max_connections)
    if allowed < max_connections:
        return warning(
            "open files",
            f"the hard limit of {hard} allows {allowed} connections, "
            f"max_connections={max_connections} needs {needed} files",
            f"raise the hard limit to {needed} (limits.conf, LimitNOFILE), or "
            f"--max-connections {allowed}",
        )
    return passed(
        "open files", f"{hard}, of which max_connections={max_connections} needs {needed}"
    )


def check_disks() -> Iterator[Finding]:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    yield _check_space(
        "temporary files",
        Path(tempfile.gettempdir()),
        GIB // 10,
        "set TMPDIR to a writable directory with enough space",
    )
    yield check_sockets()
    if Path("/dev/shm").is_dir():
        yield _check_space(
            "/dev/shm",
            Path("/dev/shm"),
            64 * 2**20,
            "increase it for the container (--shm-size 1g)",
        )
    yield _check_space(
        "hub cache",
        cache,
        5 * GIB,
        ("set HF_HOME to a disk with enough space; quire models lists its content"),
    )


def check_sockets() -> Finding:
    """Checks the sockets through which programs reach the engine process, and which CURVE
    protects.
    """
    from ...ipc.sockets import make_wire

    try:
        make_wire()
    except QuireError as error:
        return failure("sockets", str(error), "install pyzmq from PyPI's wheels")
    return passed("sockets", "protected by CURVE")


def _check_space(name: str, directory: Path, least: int, fix: str) -> Finding:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{directory}: {free / GIB:.1f} GiB free" + (
        "" if existing == directory else ", not created yet"
    )
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding(
            name,
            "fail" if name == "temporary files" else "warn",
            f"{directory} is not writable",
            fix,
        )
    return passed(name, detail) if free >= least else warning(name, detail, fix)


def check_hub() -> Finding:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return passed("hub", "offline (HF_HUB_OFFLINE): only models that are already cached")
    token = (
        "with a token"
        if (constants.HF_TOKEN_PATH and Path(constants.HF_TOKEN_PATH).exists())
        or os.environ.get("HF_TOKEN")
        else "without a token"
    )
    return passed(
        "hub",
        f"models by name come from {constants.ENDPOINT}, {token}; HF_HUB_OFFLINE=1 keeps it to "
        f"what is here",
    )
