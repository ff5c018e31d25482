"""Budgets of operations on a step's state: few registers, one launch each, and one compilation for
all steps.
"""

import pytest
import torch
from quire.kernels.triton import slots
from quire.tests.kernels.triton.budget import Budget, combinations, compiled_kernels, i32, i64

TABLES = i32(256, 32768), i32(256, 2048)


def prepare(num_requests: int, num_rows: int, num_tokens: int, width: int) -> None:
    rows = i32(num_requests), i32(num_requests), i32(num_requests + 1)
    slots.prepare_step_inputs(
        *rows,
        *TABLES,
        16,
        i32(num_tokens),
        i64(num_tokens),
        i64(num_tokens),
        i32(num_rows),
        i32(num_rows, width),
    )


def append(num_rows: int) -> None:
    is_finite = torch.empty(num_rows, dtype=torch.bool)
    slots.append_sampled_tokens(
        TABLES[0], i32(num_rows), i64(num_rows), i64(num_rows), is_finite, i32(num_rows)
    )


BUDGETS = [
    Budget(
        "write_runs",
        lambda: slots.write_runs(i32(2**24), i64(5), i32(6), i32(9000)),
        registers=48,
        wide_loads=False,
    ),
    Budget(
        "prepare_step_inputs", lambda: prepare(64, 64, 64, 2048), registers=80, wide_loads=False
    ),
    Budget(
        "gather_sampling_parameters",
        lambda: slots.gather_sampling_parameters(i32(256, 8), i32(64)),
        registers=40,
        wide_loads=False,
    ),
    Budget("append_sampled_tokens", lambda: append(64), registers=32, wide_loads=False),
]


@pytest.mark.parametrize(("budget", "arch"), combinations(BUDGETS), ids=str)
def test_budget(budget, arch):
    budget.check(arch)


def test_step_sizes_cause_no_new_compilation():
    """Only a table's width may cause a compilation. Otherwise a request would wait a second for a
    kernel that no earlier request used.
    """

    def all_sizes() -> None:
        for count, tokens, width in (
            (1, 1, 1),
            (1, 16, 3),
            (3, 3, 2048),
            (16, 16, 16),
            (17, 4096, 2000),
        ):
            prepare(count, count, tokens, width)
            prepare(count, count + 3, count + 3, 2048)
            append(count)
            slots.write_runs(i32(2**24), i64(count), i32(count + 1), i32(tokens))
            slots.gather_sampling_parameters(i32(256, 8), i32(count))

    binaries = {(kernel.name, kernel.hash) for kernel in compiled_kernels(all_sizes, 90)}
    assert len(binaries) == 4, sorted(name for name, _ in binaries)
