"""Triton's kernels in its CPU interpreter, in a process of their own: what the interpreter is to run must be decorated for it.
May know: pytest, TRITON_INTERPRET.
Must not know: any kernel.

There the parity test, which enumerates the registry, runs the kernels for GPUs on tensors in host memory, under the guard; and so does
everything in interpreted/. To run some of it by hand: TRITON_INTERPRET=1 pytest tests/kernels/test_parity.py -k rms_norm
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.timeout(600)
def test_interpreted_kernels():
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/kernels/test_parity.py", "tests/kernels/triton/interpreted"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}  # numpy multiplies small matrices there
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout.splitlines()[-1])
