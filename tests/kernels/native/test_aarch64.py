"""Native kernels for aarch64 have the bits of AVX2: the calls that other tests make are recorded,
and replayed by the library that a cross compiler makes, under qemu's user-mode emulation.

    pytest -m aarch64
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from quire.kernels.cpu.native.calls import BF16, Op
from quire.kernels.cpu.native.library import library
from quire.tests.kernels import cases
from quire.tests.kernels.native.compiled import HERE, compile_library, find_compiler
from quire.tests.kernels.native.crossed import Recording, recorded
from quire.tests.kernels.native.test_isas import native

COMPILER, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
SYSTEM = Path("/usr/aarch64-linux-gnu")  # the cross compiler's C library
# A processor of qemu that has this instruction set and no better one, or all of them
PROCESSORS = {
    "neon": "cortex-a53",
    "neon_dotprod": "cortex-a76",
    "neon_i8mm": "max",
    "neon_bf16": "max",
}
# They add pairs of bf16 products with the roundings of their instructions.
OWN_BITS = (
    "LINEAR",
    "HEADS_LINEAR",
    "EXPERTS_LINEAR",
    "ATTENTION",
    "ENCODER_ATTENTION",
    "ADD_LORA",
)
# Tests whose calls are replayed, and which of their cases
RECORDED = (
    "test_attention.py",
    "test_gguf.py",
    "test_linear.py",
    "test_isas.py",
    "test_passes.py",
    "test_program.py",
    "test_quantized.py",
    "test_sampling.py",
    "test_states.py",
    "../test_logits.py",
    "../test_moe.py",
)
CASES = (
    "not amx and not avx512 and not emulation and (avx2 and agrees_with_torch or cache_in_int8 "
    "or embeddings_are or experts or counts or softmax or sigmoid or weights_of or test_sampling "
    "or test_logits or rows_of_a or gives_the_bits or steps or rotation_and_write)"
)
# EXTERNAL calls a function of this process; the two others wait for other processes.
NOT_REPLAYED = {"EXTERNAL", "ALL_REDUCE", "ALL_GATHER"}
REPLAYED = [op.name for op in Op if op.name not in NOT_REPLAYED] + ["pack_linear", "pack_blocks"]
WRITES = ("WRITE_KV", "ROTARY_AND_WRITE_KV")
TOLERANCE = 2**-6  # a unit or two in the last place of bf16

pytestmark = [
    pytest.mark.aarch64,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        COMPILER is None or QEMU is None or find_compiler() is None,
        reason="needs g++, aarch64-linux-gnu-g++ and qemu-aarch64 "
        "(apt-get install g++ g++-aarch64-linux-gnu qemu-user)",
    ),
    pytest.mark.skipif(
        library is None or "avx2" not in library.isas, reason="needs native kernels with AVX2"
    ),
]


class Replayer:
    """The library and the replaying program, compiled for this processor and for aarch64."""

    def __init__(self, directory: Path):
        self.directory = directory
        if given := os.environ.get("QUIRE_AARCH64_LIBRARY"):  # compiled before
            self.library = Path(given)
        else:
            self.library = compile_library(directory, "-O1", compiler=COMPILER)
        for compiler, name in ((find_compiler(), "here"), (COMPILER, "there")):
            source = HERE / "replay_calls.cpp"
            command = [compiler, "-std=c++17", "-O1", source, "-o", directory / name, "-ldl"]
            subprocess.run(command, check=True)

    def run(self, recording: Recording, isa: str, threads: int = 1) -> list[list[bytes]]:
        """Returns the memory of each call after it ran."""
        calls, results = self.directory / "calls", self.directory / "results"
        recording.write(calls)
        if isa == "avx2":
            command = [str(self.directory / "here"), library._dll._name]
        else:
            emulated = [QEMU, "-cpu", PROCESSORS[isa], "-L", str(SYSTEM)]
            command = [*emulated, str(self.directory / "there"), str(self.library)]
        command += [isa, str(threads), str(calls), str(results)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return recording.split(results.read_bytes())


@pytest.fixture(scope="module")
def replayer(tmp_path_factory: pytest.TempPathFactory) -> Replayer:
    return Replayer(tmp_path_factory.mktemp("aarch64"))


def numbers(data: bytes, dtype: int) -> np.ndarray:
    """Memory as numbers of a call's dtype, in fp32."""
    width = 2 if dtype == BF16 else 4
    words = np.frombuffer(data[: len(data) // width * width], np.dtype(f"u{width}"))
    return (words.astype(np.uint32) << (32 - 8 * width)).view(np.float32)


def differences(before: bytes, expected: bytes, result: bytes, dtype: int) -> float:
    """The largest difference, relative to the largest number that was written; 0 where the bits are
    equal, or where both are NaN.
    """
    if expected == result:
        return 0
    start, want, have = (numbers(data, dtype) for data in (before, expected, result))
    written = (want.view(np.uint32) != start.view(np.uint32)) | (
        have.view(np.uint32) != start.view(np.uint32)
    )
    want, have = want[written], have[written]
    apart = (want.view(np.uint32) != have.view(np.uint32)) & ~(np.isnan(want) & np.isnan(have))
    if not apart.any():
        return 0
    size = np.abs(want[np.isfinite(want)]).max(initial=1e-30)
    return float(np.nan_to_num(np.abs(want - have)[apart] / size, nan=np.inf).max())


def are_equal(expected: bytes, result: bytes, dtype: int, *, is_write: bool) -> bool:
    """Whether the bits are equal, but for what processors make differently of NaN: its sign, and,
    where a cache is written, its number in int8.
    """
    want, have = (numbers(data, dtype).view(np.uint32) for data in (expected, result))
    apart = want != have
    if apart.any() and is_write:
        # A vector with a NaN has a NaN for its scale. Its numbers are then what the processor makes
        # of NaN, 0x80 or 0, and mean nothing.
        of_nan = bytes.maketrans(b"\x80", b"\0")
        return expected.translate(of_nan) == result.translate(of_nan)
    signs = want[apart] ^ have[apart] == 0x80000000
    rest = len(want) * (2 if dtype == BF16 else 4)
    is_nan = np.isnan(want[apart].view(np.float32))
    return expected[rest:] == result[rest:] and bool((signs & is_nan).all())


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The calls of RECORDED, on AVX2."""
    path = Path(os.environ.get("QUIRE_RECORDED") or tmp_path_factory.mktemp("calls") / "recorded")
    if not path.exists():
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "--timeout=0",
            "-m",
            "not sanitizers",
        ]
        command += ["-p", "quire.tests.kernels.native.record_calls", "-k", CASES]
        done = subprocess.run(
            [*command, *(str(HERE / name) for name in RECORDED)],
            env=os.environ | {"QUIRE_RECORDED": str(path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:]
    return pickle.loads(path.read_bytes())


@pytest.mark.parametrize("isa", PROCESSORS)
@pytest.mark.parametrize("name", REPLAYED)
def test_results_are_those_of_avx2(replayer, recording, isa, name):
    calls = Recording([record for record in recording.records if record.name == name])
    assert calls.records, f"no test of {RECORDED} calls it"
    expected, results = replayer.run(calls, "avx2"), replayer.run(calls, isa)
    for record, here, there in zip(calls.records, expected, results, strict=True):
        rounds_otherwise = isa == "neon_bf16" and record.dtype == BF16 and record.name in OWN_BITS
        for region, want, have in zip(record.regions, here, there, strict=True):
            if rounds_otherwise:
                apart = differences(region.data, want, have, record.out_dtype)
                assert apart <= TOLERANCE, region.size
            else:
                assert are_equal(want, have, record.out_dtype, is_write=record.name in WRITES), (
                    region.size
                )


def outputs(recording: Recording, results: list[list[bytes]]) -> list[bytes]:
    """What the linear layers of a recording wrote."""
    return [
        after
        for record, regions in zip(recording.records, results, strict=True)
        for region, after in zip(record.regions, regions, strict=True)
        if record.name == "LINEAR" and after != region.data
    ]


def test_a_row_is_the_same_bits_alone_and_in_products_of_matrices(replayer):
    torch.manual_seed(1)
    for case in cases.pack_linear(torch.bfloat16):
        x, run = case.args[0][:7], native("pack_linear").function
        with recorded() as together:
            replace(case, args=(x, *case.args[1:])).run(run)
        with recorded() as alone:
            for row in x.split(1):
                replace(case, args=(row, *case.args[1:])).run(run)
        joined = b"".join(outputs(alone, replayer.run(alone, "neon_bf16")))
        assert b"".join(outputs(together, replayer.run(together, "neon_bf16"))) == joined, case.name


@pytest.mark.parametrize(("processor", "isa"), [("cortex-a53", "neon_dotprod"), ("max", "avx2")])
def test_an_instruction_set_that_is_missing_is_refused(replayer, processor, isa, tmp_path):
    (tmp_path / "calls").write_bytes(bytes(8))
    command = [QEMU, "-cpu", processor, "-L", SYSTEM, replayer.directory / "there"]
    command += [replayer.library, isa, "1", tmp_path / "calls", tmp_path / "results"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "does not have the instruction set" in done.stderr
