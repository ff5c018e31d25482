"""Budgets of products of one and two rows: all weights that a program has under way are requested
before it waits for the kernel in front of it, and most programs of a layer are there at once.
"""

import re

import pytest
import torch
from quire.kernels.triton import few_rows
from quire.tests.kernels.triton.budget import Budget, bf16, combinations, compile_launches, f32


def call(rows: int, inputs: int, outputs: int, *, norm=False, gate="", residual=False, make=bf16):
    return lambda: few_rows.multiply(
        make(rows, inputs),
        make(outputs, inputs),
        make(outputs),
        (make(inputs), 1e-6) if norm else None,
        gate,
        make(rows, outputs) if residual else None,
    )


BUDGETS = [
    Budget("norm and gate, 896 x 9728", call(1, 896, 9728, norm=True, gate="silu"), 80),
    Budget("residual, 4864 x 896", call(1, 4864, 896, residual=True), 80),
    Budget("2 rows, 896 x 9728", call(2, 896, 9728, norm=True, gate="silu"), 128),
    Budget("residual, 18944 x 3584", call(1, 18944, 3584, residual=True), 208),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    for launch in budget.check(arch):
        print(launch)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_nothing_spills_in_fp32(rows):
    some = call(rows, 896, 9728, norm=True, gate="gelu", make=f32)
    (launch,) = compile_launches(some, 90)
    assert launch.stack == 0, str(launch)


@pytest.mark.parametrize(
    ("arch", "waits"), [(90, True), pytest.param(80, False, marks=pytest.mark.slow)]
)
def test_weights_are_requested_before_the_wait(arch, waits):
    (launch,) = compile_launches(call(1, 4864, 896, residual=True), arch)
    assert bool(launch.count("ACQBULK")) == waits == bool(launch.count("PREEXIT"))
    if waits:
        before, after = launch.sass.split("ACQBULK")
        tile = few_rows.tile(4864, 896)
        assert len(re.findall(r"\bLDG\S*\.128", before)) == tile["COLUMNS"] * tile["AHEAD"]
        assert "STG" in after and "STG" not in before


def test_rows_are_chosen_by_the_weights_bytes():
    small, large = torch.empty(2, 2**19), torch.empty(2**21, 2**11, device="meta")
    chosen = [
        [few_rows.is_for_few_rows(rows, weight) for rows in (0, 1, 2, 3)]
        for weight in (small, large)
    ]
    assert chosen == [[False, True, True, False], [False, True, False, False]]
