"""A step's launches in the interpreter: whatever its requests ask for, at most three after the one
that finds the largest logits, with the tokens and log-probabilities of a CPU's stages.
"""

from __future__ import annotations

import pytest
import torch
from quire.kernels import registry
from quire.tests.executor.sampling_cases import STEPS, check_step
from quire.tests.kernels.triton import guard  # noqa: F401  patches the interpreter
from triton.runtime.interpreter import GridExecutor

# numpy's warnings about masked lanes
pytestmark = pytest.mark.filterwarnings(
    "ignore:(invalid value|divide by zero) encountered:RuntimeWarning"
)
OPS = registry.select("cuda", torch.float32)
# with the one that finds the largest logits
NUM_LAUNCHES = {
    "greedy": 1,
    "temperature": 2,
    "filters": 3,
    "penalties": 2,
    "penalties and temperature": 3,
    "mask": 2,
    "edits": 2,
    "log-probabilities": 2,
    "all": 4,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_few_launches(name, monkeypatch):
    names, call = [], GridExecutor.__call__

    def counted(self, *args, **options):
        names.append(self.fn.__name__)
        return call(self, *args, **options)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    check_step(OPS, STEPS[name])
    assert len(names) == NUM_LAUNCHES[name] and names.count("first_token_kernel") == 1, names
