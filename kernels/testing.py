"""Checks an implementation of an operation against its reference, for authors of kernels.

Must not know: how an operation is implemented, models, requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .registry import implementations

REFERENCE = "reference"


def check_operation(
    op: str,
    name: str,
    calls: Iterable[Sequence[Any]],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    rows: Sequence[int] = (),
    packed: Sequence[Any] | None = None,
) -> None:
    """Checks the implementation `name` of `op` on each of `calls`, the arguments of a call.

    Results, and arguments that the operation writes, must have the reference's shapes and dtypes
    and be within `atol` + `rtol` times the reference's values; other arguments must stay unchanged.
    `rows` are the places of arguments [T, ...] that hold a row per token: then a token's results
    must have the same bits when it is computed alone. This rule makes a request's tokens
    independent of its batch.

    An operation that packs weights returns a function. `packed` has the arguments of that function,
    and results, arguments and `rows` are the function's.

    Raises AssertionError naming the implementation, the call and the largest error, and
    InvalidParameterError if there is no such operation.
    """
    found = {one.name: one.function for one in implementations(op)}
    for needed in (REFERENCE, name):
        if needed not in found:
            raise AssertionError(f"{op} has no implementation {needed!r}; there are: {[*found]}")
    for index, call in enumerate(calls):
        title = f"{op}, implementation {name!r}, call {index}"
        reference, function = found[REFERENCE], found[name]
        if packed is not None:
            reference, function, call = reference(*call), function(*call), packed
        actual = _run(function, call)
        _compare(title, actual, _run(reference, call), rtol, atol)
        if rows:
            _check_rows(title, function, call, actual, rows)


def _run(function: Callable, call: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """Runs the function on copies of the arguments. Returns its results, then the arguments."""
    args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in call]
    result = function(*args)
    results = result if isinstance(result, tuple) else () if result is None else (result,)
    named = [(f"result {i}", one) for i, one in enumerate(results)]
    named += [(f"argument {i}", arg) for i, arg in enumerate(args) if isinstance(arg, Tensor)]
    return named


def _compare(
    title: str,
    actual: list[tuple[str, Tensor]],
    expected: list[tuple[str, Tensor]],
    rtol: float,
    atol: float,
) -> None:
    names = [[name for name, _ in one] for one in (actual, expected)]
    assert names[0] == names[1], f"{title}: returns {names[0]}, the reference {names[1]}"
    for (name, mine), (_, own) in zip(actual, expected):
        assert isinstance(mine, Tensor), f"{title}: {name} is {type(mine).__name__}, not a tensor"
        kinds = [f"{list(one.shape)} {one.dtype}" for one in (mine, own)]
        assert kinds[0] == kinds[1], f"{title}: {name} is {kinds[0]}, the reference's {kinds[1]}"
        if own.is_floating_point():
            close = torch.isclose(mine, own, rtol, atol, equal_nan=True)
            error = (mine.double() - own.double()).abs()[~close]
            assert close.all(), f"{title}: {name} differs by up to {error.max().item():.3g}"
        else:
            assert torch.equal(mine, own), f"{title}: {name} differs"


def _check_rows(
    title: str,
    function: Callable,
    call: Sequence[Any],
    together: list[tuple[str, Tensor]],
    rows: Sequence[int],
) -> None:
    count = len(call[rows[0]])
    for row in range(count):
        alone = [arg[row : row + 1] if i in rows else arg for i, arg in enumerate(call)]
        for (name, one), (_, all_rows) in zip(_run(function, alone), together):
            if len(all_rows) == count and all_rows.shape[1:] == one.shape[1:]:
                bits = [t.contiguous().view(torch.uint8) for t in (one, all_rows[row : row + 1])]
                assert torch.equal(*bits), (
                    f"{title}: {name} of row {row} has other bits alone than among {count} rows"
                )
