"""Budgets of several streams and of sparse activations, at the sizes of Gemma 3n."""

import pytest
import torch
from quire.kernels.triton import altup
from quire.tests.kernels.triton.budget import Budget, bf16, combinations

STREAMS, HIDDEN, WIDTH = 4, 2048, 16384
BUDGETS = [
    Budget(
        "stack_streams",
        lambda: altup.stack_streams(bf16(64, HIDDEN), bf16(64, STREAMS - 1, HIDDEN)),
        registers=40,
    ),
    Budget(
        "match_magnitude",
        lambda: altup.match_magnitude(bf16(64, STREAMS - 1, HIDDEN), bf16(64, HIDDEN)),
        registers=64,
    ),
    Budget(
        "altup_predict",
        lambda: altup.altup_predict(
            bf16(64, STREAMS, HIDDEN), torch.zeros(64, STREAMS), torch.zeros(STREAMS**2, STREAMS)
        ),
        registers=64,
        wide_loads=False,
    ),
    Budget(
        "altup_correct",
        lambda: altup.altup_correct(
            bf16(64, STREAMS, HIDDEN),
            bf16(64, HIDDEN),
            torch.zeros(64, STREAMS),
            torch.zeros(STREAMS, STREAMS),
            0,
        ),
        registers=64,
        wide_loads=False,
    ),
    Budget(
        "gaussian_top_k",
        lambda: altup.gaussian_top_k(bf16(64, 2 * WIDTH)[:, :WIDTH], 1.6449),
        registers=80,
    ),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)
