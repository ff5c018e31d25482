"""Triton's kernels in its CPU interpreter, in a process of their own: what the interpreter is to
run must be decorated for it.

There the parity test, which enumerates the registry, runs the kernels for GPUs on tensors in host
memory, under the guard; and so does everything in interpreted/. To run some of it by hand:
TRITON_INTERPRET=1 pytest tests/kernels/test_parity.py -k rms_norm
"""

import pytest


@pytest.mark.timeout(600)
def test_interpreted_kernels(interpreter):
    process, output = interpreter
    process.wait(timeout=580)
    assert process.returncode == 0, output.read_text()
    assert " passed" in output.read_text()
