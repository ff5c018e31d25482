"""RestartBudget: delays grow without progress, and a period has a limit."""

from __future__ import annotations

from quire.frontend.supervision.restart_budget import PERIOD_S, RestartBudget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_period_has_a_limit() -> None:
    clock = Clock()
    budget = RestartBudget(2, clock)
    assert budget.take() == 0.0
    clock.now += PERIOD_S / 2
    budget.note_progress()
    assert budget.take() == 0.0
    assert budget.take() is None
    clock.now += PERIOD_S / 2
    assert budget.take() is not None  # the first is no longer in the period
    assert budget.take() is None


def test_delays_grow_until_there_is_progress() -> None:
    budget = RestartBudget(100)
    assert [budget.take() for _ in range(7)] == [0.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    budget.note_progress()
    assert budget.take() == 0.0


def test_a_restart_that_narrows_the_cause_is_not_counted() -> None:
    budget = RestartBudget(1)
    assert budget.take() == 0.0
    assert [budget.take(is_free=True) for _ in range(9)] == [1.0] * 9
    assert budget.take() is None


def test_zero_allows_none() -> None:
    budget = RestartBudget(0)
    assert budget.take() is None and budget.take(is_free=True) is None


def test_starts_that_fail_slowly_end_too() -> None:
    clock, found = Clock(), []
    budget = RestartBudget(3, clock)
    for num_failed in range(4):
        found.append(budget.take(num_failed=num_failed))
        clock.now += PERIOD_S
    assert found == [0.0, 1.0, 2.0, None]
