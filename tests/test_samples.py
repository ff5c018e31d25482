"""Samples of products have what they promise."""

from __future__ import annotations

import itertools

import pytest
from quire.tests.samples import covering

VALUES = {"dtype": "ab", "kernel": "cde", "size": "fghi"}


def test_each_value_or_each_pair_of_values_is_there() -> None:
    cases = [frozenset(case) for case in itertools.product(*VALUES.values())]
    sample = covering(cases)
    assert len(sample) == 4 and frozenset().union(*(cases[i] for i in sample)) == set("abcdefghi")
    pairs = [frozenset(itertools.combinations(sorted(case), 2)) for case in cases]
    sample = covering(pairs)
    assert len(sample) < len(cases) * 2 / 3
    assert frozenset().union(*(pairs[i] for i in sample)) == frozenset().union(*pairs)
    assert covering([]) == set() and covering([frozenset()]) == set()


@pytest.mark.sampled
@pytest.mark.parametrize("size", VALUES["size"])
@pytest.mark.parametrize("kernel", VALUES["kernel"])
def test_the_rest_is_slow(request: pytest.FixtureRequest, size: str, kernel: str) -> None:
    """Of twelve cases four run, whichever `-m` chooses."""
    items = [item for item in request.session.items if "test_the_rest_is_slow" in item.nodeid]
    is_slow = request.node.get_closest_marker("slow") is not None
    assert len(items) <= (8 if is_slow else 4)


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize("number", range(9))
def test_every_third_case_from_the_second_on(number: int, request: pytest.FixtureRequest) -> None:
    is_slow = request.node.get_closest_marker("slow") is not None
    assert is_slow == (number % 3 != 1)
