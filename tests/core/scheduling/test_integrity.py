"""The integrity check detects corruption."""

import pytest
from quire.tests.core.scheduling.loop import Loop, distinct


def _lose_a_slot(scheduler):
    scheduler.free_slots.pop()


def _forget_a_request(scheduler):
    scheduler.requests.pop("0")


def _unsort(scheduler):
    scheduler.running.reverse()


def _compute_too_much(scheduler):
    scheduler.running[0].num_computed_tokens += 5


def _list_twice(scheduler):
    scheduler.waiting.add(scheduler.running[0])


@pytest.mark.parametrize(
    "damage", [_lose_a_slot, _forget_a_request, _unsort, _compute_too_much, _list_twice]
)
def test_integrity_check_detects_corruption(damage):
    loop = Loop()
    loop.add("0", distinct(0, 20))
    loop.add("1", distinct(1, 20))
    loop.step()
    damage(loop.scheduler)
    with pytest.raises(AssertionError, match="the scheduler does not hold that"):
        loop.scheduler.check_integrity()
