"""Operations of layers with states: a request's bits do not depend on how its tokens are divided
into steps, nor on what runs beside it, and a state is written only where a step says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from quire.kernels.cpu.native.library import library
from quire.tests.kernels.case import INTERPRETED
from quire.tests.kernels.state_rows_cases import (
    Operands,
    Row,
    conv_operands,
    delta_of_rows_operands,
    delta_operands,
    scan_operands,
    states_metadata,
)
from quire.tests.kernels.test_parity import DTYPES, all_implementations, label
from torch import Tensor

OPERANDS: dict[str, Callable[..., Operands]] = {  # by operation, or operation and form
    "short_conv": conv_operands,
    "gated_delta_rule": delta_operands,
    "gated_delta_rule of rows": delta_of_rows_operands,
    "selective_scan": scan_operands,
}
IMPLEMENTATIONS = [
    (form, dtype, i)
    for form in OPERANDS
    for dtype in DTYPES
    for i in all_implementations(form.partition(" ")[0], dtype)
]
# in the interpreter one dtype in each test
half_if_interpreted = pytest.mark.sampled(step=2) if INTERPRETED else lambda test: test
TOTAL = 12 if INTERPRETED else 41  # tokens of a request
PLACE, OTHERS = 3, 4  # of the request; tokens of the requests beside it
FILL = 7.0  # of all memory that a test has not written


@pytest.fixture(params=[1] if INTERPRETED else [1, 2])
def num_threads(request) -> Iterator[int]:
    if library is not None:
        library.set_num_threads(request.param)
    yield request.param
    if library is not None:
        library.set_num_threads(1)


class Request:
    """A request, whose tokens are computed in steps."""

    def __init__(self, form: str, dtype: torch.dtype, function: Callable, num_tokens: int = TOTAL):
        torch.manual_seed(20)
        self.function = function
        self.operands = OPERANDS[form](num_tokens + OTHERS, dtype)
        self.num_tokens = num_tokens
        self.operands.state.fill_(FILL)

    def step(self, begin: int, end: int, beside: bool = False, **where: int) -> Tensor:
        """The results of tokens [begin, end). beside: between those of two other requests."""
        tokens = [x[begin:end] for x in self.operands.tokens]
        rows = [Row(end - begin, begin, PLACE, **where)]
        if beside:
            others = [x[self.num_tokens :] for x in self.operands.tokens]
            tokens = [torch.cat([x[:1], own, x[1:]]) for own, x in zip(tokens, others)]
            rows = [Row(1, 9, 0), *rows, Row(OTHERS - 1, 0, 4)]
        result = self.function(*self.operands.args(states_metadata(rows), tokens))
        return result[1 : 1 + end - begin] if beside else result

    def run(self, cuts: list[int], beside: bool = False) -> tuple[Tensor, Tensor]:
        """The results of all tokens, and the state after them."""
        edges = [0, *cuts, self.num_tokens]
        parts = [self.step(*pair, beside) for pair in pairwise(edges)]
        return torch.cat(parts), self.state()

    def state(self, place: int = PLACE) -> Tensor:
        return self.operands.state[place].clone()


@half_if_interpreted
@pytest.mark.parametrize(("form", "dtype", "implementation"), IMPLEMENTATIONS, ids=label)
def test_bits_depend_neither_on_cuts_nor_on_other_requests(
    form, dtype, implementation, num_threads
):
    request = Request(form, dtype, implementation.function)
    expected, state = request.run([])
    assert expected.isfinite().all() and (state != FILL).any()
    some = [[1], [TOTAL - 1], [2, 3], [TOTAL // 2], [8, 9, 11], list(range(1, TOTAL))]
    for cuts in [[2, 3]] if INTERPRETED else some:
        for beside in (False, True):
            result, own = request.run(cuts, beside)
            assert torch.equal(result, expected), (cuts, beside)
            assert torch.equal(own, state), (cuts, beside)


@half_if_interpreted
@pytest.mark.parametrize(("form", "dtype", "implementation"), IMPLEMENTATIONS, ids=label)
def test_a_state_is_kept_and_copied_after_the_tokens_that_a_step_names(form, dtype, implementation):
    request = Request(form, dtype, implementation.function, 9)
    expected, end = request.run([])
    states = []
    request.operands.state.fill_(FILL)
    for count in range(1, 10):
        request.step(count - 1, count)
        states.append(request.state())
    assert torch.equal(states[-1], end)
    for last in [6] if INTERPRETED else range(4, 9):
        for copy in [3, 5, 7] if INTERPRETED else (-1, 3, *range(4, 9), 9):
            request.operands.state.fill_(FILL)
            request.step(0, 4)
            result = request.step(4, 9, last=last, copy=copy, copy_place=1)
            assert torch.equal(result, expected[4:]), (last, copy)
            assert torch.equal(request.state(), states[last]), (last, copy)
            copied = states[copy] if 4 <= copy < 9 else torch.full_like(end, FILL)
            assert torch.equal(request.state(1), copied), (last, copy)
            assert all((request.state(place) == FILL).all() for place in (0, 2, 4))
    request.operands.state.fill_(FILL)
    request.step(0, 4)
    assert torch.equal(request.step(4, 9, last=3), expected[4:])  # nothing of this step is kept
    assert torch.equal(request.state(), states[3])


@half_if_interpreted
@pytest.mark.parametrize(("form", "dtype", "implementation"), IMPLEMENTATIONS, ids=label)
def test_padding_touches_no_state(form, dtype, implementation):
    operands = OPERANDS[form](3, dtype)
    operands.state.fill_(torch.nan)
    rows = [Row(1, 0, -1), Row(1, 5, -1, copy=5, copy_place=2), Row(1, 0, -1)]
    result = implementation.function(*operands.args(states_metadata(rows)))
    assert result.isfinite().all() and operands.state.isnan().all()
