"""Runs the tests of native kernels with a library compiled under AddressSanitizer and UBSan, and
under ThreadSanitizer.

    pytest -m sanitizers
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from quire.tests.kernels.native.compiled import EMULATED, ROOT, compile_library, find_compiler

pytestmark = [
    pytest.mark.sanitizers,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
]

# With checks in line and all of UBSan's, one source takes more than ten minutes to compile.
# What the checks left out would find, AddressSanitizer finds where memory is touched; unaligned
# loads are meant.
FLAGS = {
    "address": (
        "-fsanitize=address,undefined",
        "-fno-sanitize=null,alignment,vptr,pointer-overflow,object-size",
        "-fno-sanitize-recover=all",
        "--param=asan-instrumentation-with-call-threshold=0",
    ),
    "thread": ("-fsanitize=thread",),
}
RUNTIMES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
OPTIONS = {
    # ignores Python's own leaks at exit
    "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1",
}
# Under ThreadSanitizer only tests with threads run, because emulated arithmetic is slow there. It
# does not support forks beside threads.
THREADED = ("pool", "isas", "passes", "lora", "encoder", "ranks")
TESTS = {
    "address": ("tests/kernels/native",),
    "thread": tuple(f"tests/kernels/native/test_{name}.py" for name in THREADED),
}
SELECTION = {
    "address": "not limit_memory and not emulation",
    "thread": "not fork and not limit_memory and not amx and not emulation",
}


def runtime(name: str) -> str:
    """The path of a sanitizer's library. It must be loaded before Python, which is compiled without
    it.
    """
    done = subprocess.run(
        [find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    if not Path(done.stdout.strip()).is_absolute():
        pytest.skip(f"the compiler comes without {name}")
    return done.stdout.strip()


@pytest.fixture(scope="module", params=FLAGS)
def checked(request, tmp_path_factory) -> tuple[str, dict[str, str]]:
    """A sanitizer's name, and the environment of a process whose native library is compiled with
    it.
    """
    library = compile_library(
        tmp_path_factory.mktemp(request.param),
        *EMULATED,
        *FLAGS[request.param],
        "-O1",
        "-g1",
        "-fno-var-tracking-assignments",
        "-fno-omit-frame-pointer",
    )
    preload = ":".join(runtime(name) for name in RUNTIMES[request.param])
    return request.param, {
        **os.environ,
        **OPTIONS,
        "LD_PRELOAD": preload,
        "QUIRE_NATIVE": str(library),
        "OMP_NUM_THREADS": "1",
    }


def run(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    # Address randomisation can collide with ThreadSanitizer's own memory.
    command = ["setarch", "--addr-no-randomize", sys.executable, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_no_findings(checked):
    sanitizer, environment = checked
    selection = ("-m", "not sanitizers and not slow", "-k", SELECTION[sanitizer])
    code, output = run(
        environment,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--timeout=900",
        "-s",
        *TESTS[sanitizer],
        *selection,
    )
    assert code == 0 and " passed" in output, output[-8000:]


FAULT = """
import torch
from quire.kernels.cpu.native.calls import Op, SiluAndMul
from quire.kernels.cpu.native.program import run_call
from quire.kernels.cpu.native.library import library
library.set_num_threads(2)
x, out = torch.ones(1000, 512), torch.empty({num_rows}, 256)
for _ in range(100):
    run_call(SiluAndMul, Op.SILU_AND_MUL, x, x=x, out=out, out_row={out_row}, size=256)
"""


def test_faults_are_found(checked):
    """Rows past the end of their memory, and two threads that write one row: shows that the test
    above can fail.
    """
    sanitizer, environment = checked
    fault = (
        FAULT.format(num_rows=999, out_row=256)
        if sanitizer == "address"
        else FAULT.format(num_rows=1000, out_row=0)
    )
    code, output = run(environment, "-c", fault)
    assert (
        code != 0 and ("heap-buffer-overflow" if sanitizer == "address" else "data race") in output
    ), output[-4000:]
