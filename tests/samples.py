"""Which cases of a large product run in each run, and which with `pytest -m slow` only."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest

NOT_IN_EACH_RUN = {"slow", "all_models", "chaos"}


def mark_rest_slow(items: Iterable[pytest.Item]) -> None:
    """Mark as slow all cases of each test with the mark `sampled` but a few. Its parameters may
    come from several decorators and fixtures.

    sampled: the few together have each value of each parameter.
    sampled(pairs=True): they have each pair of values of two parameters.
    sampled(step=3): they are every third one, from the first on, in the next test of the same file
    from the second on, so that tests with the same cases have all of them together.
    """
    cases: dict[Any, list[pytest.Function]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and "sampled" in marks and not marks & NOT_IN_EACH_RUN:
            cases[item.parent, item.originalname].append(item)
    numbers: Counter[Any] = Counter()  # of tests, by the file or class that they are in
    for (parent, _), group in cases.items():
        mark = group[0].get_closest_marker("sampled")
        assert mark is not None
        sample = _sample(group, numbers[parent], **mark.kwargs)
        numbers[parent] += 1
        for i, item in enumerate(group):
            if i not in sample:
                item.add_marker(pytest.mark.slow)


def _sample(
    group: list[pytest.Function], number: int, pairs: bool = False, step: int = 0
) -> range | set[int]:
    if step:
        return range(number % min(step, len(group)), len(group), step)
    return covering([_parts(item, pairs) for item in group]) or {0}


def covering(cases: Sequence[frozenset[Hashable]]) -> set[int]:
    """Return the indices of a few cases that together contain whatever any case contains. Each is
    the one that adds most to those before it, of equal ones the first.
    """
    sample: set[int] = set()
    missing = set().union(*cases)
    gains = [(-len(parts), i) for i, parts in enumerate(cases)]
    heapq.heapify(gains)
    while missing:
        _, i = heapq.heappop(gains)
        gain = -len(cases[i] & missing)  # no larger than when it was last counted
        if gains and (gain, i) > gains[0]:
            heapq.heappush(gains, (gain, i))
        else:
            sample.add(i)
            missing -= cases[i]
    return sample


def _parts(item: pytest.Function, pairs: bool) -> frozenset[Hashable]:
    """Return the values of a case, with the names of their parameters, or all pairs of those."""
    values = item.callspec.params.items() if hasattr(item, "callspec") else ()
    parts = [(name, _identity(value)) for name, value in values]
    return frozenset(itertools.combinations(sorted(parts, key=repr), 2) if pairs else parts)


def _identity(value: Any) -> Hashable:
    """Return what tells apart the values of a parameter: lists and tensors have no hash."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value
