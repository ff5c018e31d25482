"""Budgets of products of one to four rows: all weights that a program has under way are requested
before it waits for the kernel in front of it, and most programs of a layer are there at once.
"""

import re

import pytest
from quire.kernels.triton import few_rows, gemv
from quire.tests.kernels.triton.budget import Budget, bf16, combinations, compile_launches


def call(rows: int, inputs: int, outputs: int, *, norm=False, gate="", residual=False):
    return lambda: gemv.multiply(
        bf16(rows, inputs),
        bf16(outputs, inputs),
        bf16(outputs),
        (bf16(inputs), 1e-6) if norm else None,
        gate,
        bf16(rows, outputs) if residual else None,
    )


BUDGETS = [
    Budget("gemv, norm and gate, 896 x 9728", call(1, 896, 9728, norm=True, gate="silu"), 80),
    Budget("gemv, residual, 4864 x 896", call(1, 4864, 896, residual=True), 80),
    Budget("gemv, 4 rows, 896 x 9728", call(4, 896, 9728, norm=True, gate="silu"), 168),
    Budget("gemv, residual, 18944 x 3584", call(1, 18944, 3584, residual=True), 208),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    for launch in budget.check(arch):
        print(launch)


@pytest.mark.parametrize(
    ("arch", "waits"), [(90, True), pytest.param(80, False, marks=pytest.mark.slow)]
)
def test_weights_are_requested_before_the_wait(arch, waits):
    (launch,) = compile_launches(call(1, 4864, 896, residual=True), arch)
    assert bool(launch.count("ACQBULK")) == waits == bool(launch.count("PREEXIT"))
    if waits:
        before, after = launch.sass.split("ACQBULK")
        tile = gemv.tile(4864, 896)
        assert len(re.findall(r"\bLDG\S*\.128", before)) == tile["COLUMNS"] * tile["AHEAD"]
        assert "STG" in after and "STG" not in before


def test_few_rows_go_there(monkeypatch):
    taken = []
    monkeypatch.setattr(gemv, "multiply", lambda x, *rest: taken.append(len(x)))
    monkeypatch.setattr(few_rows, "multiply_tiles", lambda *arguments: None)
    for rows in (1, 4, 5, 16):
        few_rows.multiply(bf16(rows, 8), bf16(8, 8), None, bf16(1))
    assert taken == [1, 4]
