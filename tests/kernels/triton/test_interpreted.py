"""Triton's kernels in its CPU interpreter, in a separate process, because kernels must be decorated
for the interpreter.

The process runs the parity test and that of states, which enumerate the registry, with the GPU
kernels on tensors in host memory under the guard, and all tests of interpreted/. To run some of
them by hand:

    TRITON_INTERPRET=1 pytest tests/kernels/test_parity.py -k rms_norm
"""

import pytest


@pytest.mark.timeout(600)
def test_interpreted_kernels(interpreter):
    process, output = interpreter
    process.wait(timeout=580)
    assert process.returncode == 0, output.read_text()
    assert " passed" in output.read_text()
