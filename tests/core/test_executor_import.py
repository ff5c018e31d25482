"""What runs a model is imported before there is a configuration."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from quire.core.executor_import import begin_import

begin_import("cuda").result()
import torch

assert "quire.executor.worker" in sys.modules
assert "quire.kernels.triton.attention" in sys.modules
assert not torch.cuda.is_initialized()
"""


@pytest.mark.slow
def test_what_runs_on_a_gpu_is_imported_without_its_memory() -> None:
    pytest.importorskip("triton")
    subprocess.run([sys.executable, "-P", "-c", SCRIPT], check=True)
