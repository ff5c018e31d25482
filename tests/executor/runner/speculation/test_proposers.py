"""Prompt lookup against its definition, written as loops."""

from __future__ import annotations

import random

import numpy as np
from quire.executor.runner.speculation.proposers import FirstOf, NgramProposer
from quire.executor.runner.speculation.suffix_proposer import SuffixProposer


def looked_up(tokens: list[int], least: int, most: int, count: int) -> list[int]:
    """The latest place of the longest end; what follows it, repeated with its period."""
    for length in range(min(most, len(tokens) - 1), least - 1, -1):
        end = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == end:
                follows = tokens[start + length :]
                return [follows[i % len(follows)] for i in range(count)]
    return []


def test_random_texts():
    rng = random.Random(1)
    num_found = 0
    for _ in range(3000):
        tokens = rng.choices(range(rng.choice([2, 4, 20])), k=rng.randint(1, 40))
        least = rng.randint(1, 4)
        most, count = least + rng.randint(0, 4), rng.randint(1, 8)
        found = NgramProposer(least, most).propose(np.array(tokens, np.int32), count, None)
        found = found.tolist()
        assert found == looked_up(tokens, least, most, count), (tokens, least, most, count)
        num_found += bool(found)
    assert num_found > 1000


def test_the_first_that_finds_something():
    suffix = SuffixProposer(8, 10, 1.0, 0.0)
    both = FirstOf(NgramProposer(2, 4), suffix)
    both.remember(np.array([1, 2, 3, 4], np.int32), None)
    assert both.propose(np.array([1, 2], np.int32), 4, None).tolist() == [3, 4]
    assert both.propose(np.array([1, 2, 9, 1, 2], np.int32), 2, None).tolist() == [9, 1]
