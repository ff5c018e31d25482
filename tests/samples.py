"""Which cases of a large product run in each run, and which with `pytest -m slow` only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def every(step: int, cases: Iterable[Any], start: int = 0) -> list[Any]:
    """Parameters of a test, of which every `step`-th case, from `start` on, is no slow test."""
    return [_param(case, is_slow=(i - start) % step != 0) for i, case in enumerate(cases)]


def _param(case: Any, is_slow: bool) -> Any:
    values: Sequence[Any] = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=[pytest.mark.slow] if is_slow else [])
