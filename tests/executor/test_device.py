"""Device, dtypes and threads of the executor."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import weakref

import numpy as np
import psutil
import pytest
import torch
from quire.executor import device as devices
from quire.ipc.config import DeviceConfig, EngineConfig
from quire.ipc.errors import InvalidParameterError
from quire.ipc.machine import available_cores
from quire.kernels.cpu.native.library import library
from quire.tests.garbage import nothing_frozen

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("built_for", "lacking"),
    [
        (None, f"PyTorch {torch.__version__} is built without CUDA"),
        ("13.0", "PyTorch finds no NVIDIA GPU"),
    ],
)
def test_cuda_without_a_gpu_is_refused(built_for, lacking, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    with pytest.raises(InvalidParameterError) as caught:
        devices.select_device("cuda")
    assert str(caught.value) == f"device: cuda: {lacking} (quire doctor says what is here); use cpu"
    assert devices.select_device("cpu") == CPU


def test_each_rank_has_a_gpu(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1] if chosen else 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    sizes = DeviceConfig(device="cuda", tensor_parallel_size=2, pipeline_parallel_size=2)
    config = EngineConfig(device_config=sizes)
    devices.use_gpu_of_rank(config, 3)
    assert devices.select_device("cuda") == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(InvalidParameterError, match="each of the 4 ranks .* PyTorch finds 3"):
        devices.use_gpu_of_rank(config, 0)


def test_memory_of_a_gpu(monkeypatch):
    """Of 100 bytes 30 are in use; a share of 0.9 leaves 60."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    gpu = torch.device("cuda", 0)
    assert (
        devices.free_bytes(gpu) == 70
        and devices.free_share_bytes(gpu, 0.9) == 60
        and devices.free_share_bytes(gpu, 0.2) == -10
    )
    assert devices.free_bytes(CPU) > 0


@pytest.mark.parametrize(
    ("own", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")]
)
def test_idle_threads_sleep_unless_the_user_sets_a_policy(own, policy):
    """OpenMP reads the policy when torch is imported, so the package must set it before."""
    program = (
        "import os, sys; import quire.executor; print(os.environ['OMP_WAIT_POLICY'], 'torch' in "
        "sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | own,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == [policy, "False"]


@pytest.mark.parametrize("name", ["auto", "tpu"])
def test_unresolved_values_are_refused(name):
    with pytest.raises(InvalidParameterError, match="device: must be cpu or cuda"):
        devices.select_device(name)
    with pytest.raises(InvalidParameterError, match="dtype: must be one of"):
        devices.select_dtype(name, CPU)


def test_dtypes():
    assert devices.select_dtype("bfloat16", CPU) == torch.bfloat16
    assert devices.select_dtype("float32", CPU) == torch.float32
    with pytest.raises(InvalidParameterError, match="float16 is not supported on a CPU"):
        devices.select_dtype("float16", CPU)


@pytest.fixture
def best_isa():
    """The instruction set is chosen for the whole process."""
    yield
    if library is not None:
        library.use_isa(library.isas[0])


def test_an_instruction_set_that_the_processor_lacks_is_refused(monkeypatch, best_isa):
    assert devices.select_cpu_isa("none") == "none"
    if library is not None:
        assert devices.select_cpu_isa("avx2") == library.isa == "avx2"
        assert devices.select_cpu_isa("auto") == library.isa == library.isas[0]
        monkeypatch.setattr(library, "isas", ("avx2",))
        with pytest.raises(
            InvalidParameterError, match="cpu_isa: this processor has no amx; it has avx2"
        ):
            devices.select_cpu_isa("amx")
    monkeypatch.setattr(devices, "library", None)
    assert devices.select_cpu_isa("auto") == "none"
    with pytest.raises(InvalidParameterError, match="cpu_isa: avx2 needs the native kernels"):
        devices.select_cpu_isa("avx2")


def test_set_num_threads(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    try:
        assert devices.set_num_threads(2) == torch.get_num_threads() == 2
        assert devices.set_num_threads(None) == torch.get_num_threads() == available_cores()
        monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
        assert devices.set_num_threads(None) == torch.get_num_threads() == 3
        assert devices.set_num_threads(1) == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_zeros_uses_only_memory_that_is_written():
    resident = psutil.Process().memory_info().rss
    tensor = devices.zeros((2, 2**20, 64), torch.bfloat16, CPU)  # 256 MiB
    assert psutil.Process().memory_info().rss - resident < 2**26
    tensor[1, -1] = 1.0
    assert tensor.shape == (2, 2**20, 64) and tensor.is_contiguous() and tensor[1, -2:].sum() == 64


def test_released_pages_of_a_file_are_read_again(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(256)) * 200)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)[100:]
        tensor[5000] = 99  # a private copy of its page, which is lost when the page is released
        devices.release_mapped(tensor)
        assert tensor.tolist() == list(path.read_bytes()[100:])
        del tensor


def test_partial_pages_are_kept():
    around = torch.arange(3 * mmap.PAGESIZE, dtype=torch.uint8)
    before = around.clone()
    first = -around.data_ptr() % mmap.PAGESIZE  # of the first whole page
    devices.release_mapped(around[first + 1 : first + mmap.PAGESIZE - 1])
    assert torch.equal(around, before)


def test_releasing_memory_collects_frozen_cycles():
    class Node:
        pass

    with nothing_frozen():
        node = Node()
        node.itself, gone = node, weakref.ref(node)
        gc.freeze()
        del node
        devices.release_memory()
        assert gone() is None and gc.get_freeze_count() > 0  # the others stay frozen
        gc.unfreeze()
        devices.release_memory()
        assert gc.get_freeze_count() == 0


def test_fp8_needs_a_gpu_that_converts_it(monkeypatch):
    gpu = torch.device("cuda", 0)
    for capability, is_enough in (
        ((8, 0), False),
        ((8, 6), False),
        ((8, 9), True),
        ((9, 0), True),
        ((10, 0), True),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, capability=capability: capability
        )
        assert devices.select_kv_cache_dtype("auto", torch.bfloat16, gpu) == torch.bfloat16
        if is_enough:
            assert devices.select_kv_cache_dtype("fp8", torch.bfloat16, gpu) == torch.float8_e4m3fn
        else:
            with pytest.raises(
                InvalidParameterError,
                match=rf"kv_cache_dtype: fp8 needs .* 8\.9 or newer .* this one has "
                rf"{capability[0]}\.{capability[1]}; use auto",
            ):
                devices.select_kv_cache_dtype("fp8", torch.bfloat16, gpu)


def test_int8_caches_are_for_cpus_and_gpus():
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        assert devices.select_kv_cache_dtype("int8", torch.bfloat16, device) == torch.int8


def test_arrays_packed_for_one_copy():
    chance = np.random.default_rng(0)
    for lengths in ([3, 5, 7], [0, 1, 4], [257, 0, 2, 129, 0]):
        arrays = {
            str(i): chance.integers(-9, 9, n).astype((np.int64, np.int32)[i % 2])
            for i, n in enumerate(lengths)
        }
        arrays["strided"] = chance.integers(0, 9, 12).astype(np.int32)[::3]
        tensors = devices.packed(arrays, CPU)
        assert tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(tensors[name].numpy(), array, strict=True)
            assert (
                tensors[name].data_ptr() - tensors["0"].data_ptr()
            ) % devices.ALIGNMENT == 0 or not array.size
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1
