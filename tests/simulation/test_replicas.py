"""Many replicas in a simulation: the router beside other rules, and the simulation beside steps."""

from __future__ import annotations

import math
from functools import cache

import pytest
from quire.frontend.clients.replicas.routing import num_tokens_of, prefix_keys
from quire.tests.simulation.replicas import (
    RULES,
    Engine,
    Machine,
    Result,
    Traffic,
    Turn,
    conversations,
    keys_of,
    num_keys,
    simulate,
)


@cache
def result(name: str) -> Result:
    return simulate(RULES[name], 12, Traffic(rate=12 * 0.45, day_s=60.0))


@pytest.mark.parametrize("other", ["round robin", "least load"])
def test_the_router_beats_rules_that_know_no_prefixes(other: str) -> None:
    router, worse = result("router"), result(other)
    assert len(router.first_token_s) == len(worse.first_token_s) > 1000
    assert router.quantile(0.99) < 0.5 * worse.quantile(0.99)
    assert router.quantile(0.5) < 0.5 * worse.quantile(0.5)
    assert router.hit_rate > worse.hit_rate + 0.2


def test_the_router_hits_as_often_as_if_nobody_moved_and_balances_better() -> None:
    router, sticky = result("router"), result("sticky")
    assert router.hit_rate > 0.95 * sticky.hit_rate
    assert router.quantile(0.99) < sticky.quantile(0.99)


def turn(number: int, num_prompt: int, num_answer: int) -> Turn:
    return Turn(number, number, 0, num_prompt, num_answer, 0.0, [])


def test_an_engine_takes_the_time_of_its_steps() -> None:
    """Against a loop over steps, in which a prompt's first token ends its last step."""
    machine = Machine(step_s=0.02, token_s=0.0005, max_num_batched_tokens=64)
    turns = [turn(i, 100 + 37 * i, 5 + 3 * i) for i in range(6)]
    engine = Engine(machine)
    for one in turns:
        engine.add(one)
    first_at, end_at, now = {}, {}, 0.0
    while (when := engine.next_event()) < math.inf:
        first, ended = engine.advance(when)
        first_at |= {one.conversation: when for one in first}
        end_at |= {one.conversation: when for one in ended}
    left = [float(one.num_prompt) for one in turns]
    rows: dict[int, int] = {}
    step_first, step_end = {}, {}
    while len(step_end) < len(turns):
        chunk, begun = machine.max_num_batched_tokens - len(rows), []
        num_tokens = len(rows)
        for i, remaining in enumerate(left):
            if remaining and chunk:
                part = min(chunk, remaining)
                left[i] -= part
                chunk -= part
                num_tokens += part
                begun += [i] * (left[i] == 0)
        now += machine.step_s + machine.token_s * num_tokens
        for i in list(rows):
            rows[i] -= 1
            if rows[i] == 0:
                del rows[i]
                step_end[i] = now
        for i in begun:
            rows[i], step_first[i] = turns[i].num_answer, now
    longest_step = machine.step_s + machine.token_s * 64
    for i in range(len(turns)):
        assert first_at[i] == pytest.approx(step_first[i], abs=2 * longest_step)
        assert end_at[i] == pytest.approx(step_end[i], abs=4 * longest_step)


def test_every_request_of_a_day_is_answered() -> None:
    traffic = Traffic(rate=2.0, day_s=30.0)
    turns = list(conversations(traffic, 0))
    assert 0.7 * 60 < len(turns) < 1.3 * 60
    middle = [one for one in turns if 10 < one.arrival < 20]
    assert len(middle) > 1.3 * len(turns) / 3  # the day has a peak
    wanted = sum(1 + len(one.later) for one in turns)
    for kind in RULES.values():
        day = simulate(kind, 3, traffic)
        assert len(day.first_token_s) == wanted and min(day.first_token_s) > 0
        assert 0 < day.num_cached < day.num_prompt


def test_keys_are_as_many_as_those_of_a_text() -> None:
    for length in (0, 15, 16, 500, 512, 575, 576, 3000):
        assert num_keys(length) == len(prefix_keys(range(length)))
        assert num_tokens_of(num_keys(length)) <= length
    one, other = Turn(1, 0, 300, 1000, 1, 0.0, []), Turn(2, 0, 300, 1000, 1, 0.0, [])
    shared = set(keys_of(one)) & set(keys_of(other))
    assert len(shared) == num_keys(300) and len(keys_of(one)) == num_keys(1000)
