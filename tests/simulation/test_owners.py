"""Owners' shares of several engines: what one engine gives them (D66), N give them together."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from quire.tests.simulation.owners import STEP_S, TOKEN_S, Engines, Sender


def assert_fair(engines: Engines, seconds: float, least: float, most: float = math.inf) -> None:
    """Each owner gets at least and at most these parts of its share of all tokens."""
    senders = engines.senders.values()
    weight = sum(sender.weight for sender in senders)
    got = engines.run(seconds)
    parts = {sender.name: got[sender.name] / (sender.weight / weight) for sender in senders}
    assert min(parts.values()) >= least, (parts, engines.served_by)
    assert max(parts.values()) <= most, (parts, engines.served_by)


IN_TURNS = {
    "weights": [Sender("a", weight=3.0), Sender("b")],
    "long prompts": [Sender("a", num_own=60), Sender("b"), Sender("c")],
    "prefixes": [Sender("a"), *(Sender(name, num_own=10, num_shared=150) for name in "bc")],
}


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(("kind", "number"), [*((kind, 2) for kind in IN_TURNS), ("weights", 4)])
def test_owners_whose_requests_arrive_in_turns(kind: str, number: int) -> None:
    """All requests are equal and arrive at once, in turns, which a rule that looks at the sum of
    loads divides by owner.
    """
    engines = Engines(number, IN_TURNS[kind], num_each=100 * number, spread=0.0)
    engines.run(0.5)
    assert_fair(engines, 2.5, least=0.9, most=1.1)


def workload(seed: int) -> Engines:
    """Owners with three to five times as many requests as their shares of slots."""
    rng = random.Random(seed)
    number, num_slots = rng.choice([2, 2, 3]), rng.choice([8, 16])
    weights = [rng.choice([1.0, 1.0, 1.0, 2.0, 4.0]) for _ in range(rng.randint(2, 4))]
    num_at_once = rng.choice([3, 5]) * num_slots * number / sum(weights)
    senders = [
        Sender(
            name,
            weight,
            math.ceil(num_at_once * weight) + 2,
            rng.choice([0, 0, 150, 250]),
            rng.choice([5, 30, 100]),
            rng.choice([2, 20, 60]),
        )
        for name, weight in zip("abcd", weights)
    ]
    return Engines(
        number,
        senders,
        seed=seed,
        max_num_seqs=num_slots,
        max_num_batched_tokens=rng.choice([32, 64, 256]),
        max_model_len=512,
    )


@pytest.mark.parametrize("seed", range(4))
def test_shares_in_random_workloads(seed: int) -> None:
    engines = workload(seed)
    engines.run(1.5)
    assert_fair(engines, 3.0, least=0.85)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_shares_in_many_workloads(seed: int) -> None:
    engines = workload(seed)
    engines.run(5.0)
    assert_fair(engines, 10.0, least=0.85)


@pytest.mark.parametrize("num_shared", [0, 150])
@pytest.mark.parametrize("number", [1, 2])
def test_a_first_token_under_the_flood_of_another(number: int, num_shared: int) -> None:
    """At most three times that alone and a step of the flood, wherever the prefix is cached."""

    def first_token_s(*others: Sender) -> float:
        sender = Sender("b", num_at_once=1, num_answer=8, num_shared=num_shared, pause_s=0.05)
        engines = Engines(number, [sender, *others])
        engines.run(1.0)
        few = engines.senders["b"]
        few.first_token_s.clear()
        engines.run(4.0)
        assert len(few.first_token_s) > 15
        return median(few.first_token_s)

    step_s = STEP_S + 64 * TOKEN_S
    flood = Sender("a", num_at_once=50 * number, num_answer=40)
    assert first_token_s(flood) <= 3 * first_token_s() + step_s
