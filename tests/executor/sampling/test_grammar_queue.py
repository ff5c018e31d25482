"""The order in which grammars of several owners are checked, and what slow ones may take."""

from __future__ import annotations

import random

import pytest
from quire.executor.sampling.grammar_queue import (
    ALLOWANCE_PER_S,
    ALLOWANCE_S,
    MAX_OWNERS,
    GrammarQueue,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(queue: GrammarQueue, clock: Clock, seconds: dict[str, float], workers: int, until: float):
    """Works for a while, each check taking `seconds[owner]`; yields (end, owner, grammar)."""
    running: list[tuple[float, str, int, bool]] = []
    while clock.now < until:
        while len(running) < workers and (taken := queue.take()) is not None:
            running.append((clock.now + seconds[taken[0]], *taken))
        if not running:
            return
        running.sort()
        clock.now, owner, grammar, was_slow = running.pop(0)
        queue.done(owner, seconds[owner], was_slow)
        yield clock.now, owner, grammar


def test_one_owner_is_served_in_order_by_all_workers():
    clock = Clock()
    queue = GrammarQueue(2, clock)
    for grammar in (3, 1, 2, 1):
        queue.add("a", grammar)
    assert [queue.take(), queue.take(), queue.take()] == [
        ("a", 3, False),
        ("a", 1, False),
        ("a", 2, False),
    ]
    assert queue.take() is None
    queue.add("a", 1)  # it was taken
    assert queue.take() == ("a", 1, False)


@pytest.mark.parametrize("num_slow", [1, 5])
def test_the_first_grammar_of_another_owner_waits_for_no_slow_one(num_slow):
    """Forty slow grammars of each slow owner, as many seconds in turn."""
    clock = Clock()
    queue = GrammarQueue(2, clock)
    seconds = {f"slow{i}": 1.5 for i in range(num_slow)} | {"usual": 0.02}
    for grammar in range(40):
        for i in range(num_slow):
            queue.add(f"slow{i}", grammar)
    # each has been found to be slow
    for _ in run(queue, clock, seconds, 2, 1.5 * num_slow + 3):
        pass
    for number in range(20):
        start = clock.now
        queue.add("usual", 1000 + number)
        ends = (now for now, owner, _ in run(queue, clock, seconds, 2, 1e9) if owner == "usual")
        assert next(ends) - start < 0.1


def test_slow_owners_share_the_time_of_their_worker():
    clock = Clock()
    queue = GrammarQueue(2, clock)
    seconds = {"a": 1.5, "b": 0.75}
    for grammar in range(100):
        queue.add("a", grammar)
        queue.add("b", grammar)
    ends = [owner for _, owner, _ in run(queue, clock, seconds, 2, 60.0)]
    assert abs(1.5 * ends.count("a") - 0.75 * ends.count("b")) <= 3.0


def test_an_allowance_fills_up_again_and_absence_gives_no_credit():
    clock = Clock()
    queue = GrammarQueue(2, clock)
    queue.add("a", 1)
    queue.done("a", ALLOWANCE_S + 1.0, queue.take()[2])
    queue.add("a", 2)
    assert queue.take()[2]
    queue.done("a", 0.0, True)
    clock.now += 1.1 / ALLOWANCE_PER_S
    queue.add("a", 3)
    assert queue.take() == ("a", 3, False)
    queue.add("new", 4)
    queue.add("a", 5)
    queue.add("new", 6)
    order = []
    while (taken := queue.take()) is not None:
        order.append(taken[0])
        queue.done(taken[0], 0.1, taken[2])
    assert order[:2] in (["a", "new"], ["new", "a"])


@pytest.mark.parametrize("seed", range(20))
def test_every_grammar_gets_its_turn(seed):
    draw, clock = random.Random(seed), Clock()
    queue = GrammarQueue(draw.choice([1, 2, 4]), clock)
    seconds = {f"o{i}": draw.choice([0.01, 0.3, 1.5]) for i in range(draw.randint(1, 6))}
    added = {(draw.choice(list(seconds)), grammar) for grammar in range(50)}
    for owner, grammar in added:
        queue.add(owner, grammar)
    ended = [(owner, grammar) for _, owner, grammar in run(queue, clock, seconds, 2, 1e9)]
    assert len(ended) == len(added) and set(ended) == added


def test_owners_are_forgotten_unless_they_wait():
    queue = GrammarQueue(2)
    queue.add("waits", 0)
    for i in range(2 * MAX_OWNERS):
        queue.add(f"o{i}", i)
        taken = queue.take()
        queue.done(taken[0], 1.0, taken[2])
        while taken[0] != f"o{i}":
            queue.add(taken[0], 0)
            taken = queue.take()
            queue.done(taken[0], 1.0, taken[2])
    assert len(queue._owners) <= MAX_OWNERS
