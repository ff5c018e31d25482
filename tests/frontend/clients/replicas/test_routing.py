"""Which replica a request goes to."""

from __future__ import annotations

import random

import pytest
from quire.frontend.clients.replicas.routing import (
    COARSE_TOKENS,
    FINE_TOKENS,
    LOST,
    NUM_FINE,
    REPLACED,
    SLACK_TOKENS,
    PrefixTable,
    Router,
    fair_wait,
    most_load,
    num_tokens_of,
    prefix_keys,
)

BLOCK = list(range(FINE_TOKENS))


def prompt(number: int, num_blocks: int) -> list[int]:
    return [number, *range(num_blocks * FINE_TOKENS - 1)]


def test_prompts_share_keys_as_far_as_their_tokens_are_equal() -> None:
    keys = prefix_keys(BLOCK * 3 + [1, 2])
    assert len(keys) == 3 and len(set(keys)) == 3
    assert prefix_keys(BLOCK * 2 + [5] * FINE_TOKENS)[:2] == keys[:2]
    assert prefix_keys(BLOCK * 2 + [5] * FINE_TOKENS)[2] != keys[2]
    assert prefix_keys(BLOCK[1:]) == []
    assert not set(prefix_keys(BLOCK * 3, "tenant")) & set(keys)


def test_keys_of_long_prompts_are_further_apart() -> None:
    length = FINE_TOKENS * NUM_FINE + 3 * COARSE_TOKENS
    keys = prefix_keys(range(length))
    assert len(keys) == NUM_FINE + 3 and num_tokens_of(len(keys)) == length
    for number in (1, NUM_FINE - 1, NUM_FINE, NUM_FINE + 1, NUM_FINE + 2):
        end = num_tokens_of(number)
        assert prefix_keys(range(end)) == keys[:number]
        assert prefix_keys(range(end - 1)) == keys[: number - 1]


@pytest.mark.parametrize(
    ("queued", "own", "others", "weight", "expected"),
    [
        (0, 0, 0, 1, 0),
        (900, 900, 0, 1, 900),  # one owner: all that came before
        (900, 0, 1, 1, 100),  # the other owner gets as much as this one meanwhile
        (900, 200, 1, 1, 500),
        (900, 0, 1, 2, 50),  # half as much, at twice its weight
        (900, 200, 1, 0.5, 800),
        (900, 200, 7, 1, 900),  # not more than there is
    ],
)
def test_owners_take_turns(queued, own, others, weight, expected) -> None:
    assert fair_wait(queued, own, 100, others, weight) == expected


def test_the_table_is_what_a_list_of_prompts_says() -> None:
    """Against a model without limits: the table holds prefixes of what was noted, and of the last
    prompts everything.
    """
    rng, table = random.Random(0), PrefixTable(3, 40 * FINE_TOKENS)
    noted: list[list[list[int]]] = [[], [], []]
    for _ in range(400):
        replica = rng.randrange(3)
        keys = prefix_keys(prompt(rng.randrange(6), rng.randint(1, 9)), rng.randrange(2))
        before = {other: table.num_held(other, keys) for other in range(3)}
        longest = table.longest(keys)
        assert longest.get(max(before, key=before.__getitem__), 0) == max(before.values())
        assert all(longest[other] == before[other] for other in longest)
        for other, num_held in before.items():
            known = [k for one in noted[other] for k in one]
            assert all(key in known for key in keys[:num_held])
        table.note(replica, keys)
        assert table.num_held(replica, keys) == len(keys)
        noted[replica].append(keys)
    assert [sum(own.values()) for own in table._keys] == table._num_tokens
    assert max(table._num_tokens) <= 40 * FINE_TOKENS
    for replica in range(3):
        table.forget(replica)
    assert table._holders == {} and table.longest(keys) == {}


def test_a_conversation_stays_where_its_prefix_is() -> None:
    router = Router(4, 100_000, 64)
    first = {}
    for turn in range(1, 6):
        for conversation in range(12):
            keys = prefix_keys(prompt(conversation, 4 * turn))
            load = router.place(keys, 4 * turn * FINE_TOKENS)
            assert first.setdefault(conversation, load.replica) == load.replica
            assert load.num_uncached == 4 * FINE_TOKENS
            router.begin(load)
            router.end(load)
    assert {list(first.values()).count(replica) for replica in range(4)} != {0}


def test_requests_without_a_prefix_go_to_the_least_load() -> None:
    router = Router(3, 100_000, 64)
    loads = [router.place(prefix_keys(prompt(i, 3)), 3 * FINE_TOKENS) for i in range(9)]
    assert [loads.count(load) for load in loads] == [1] * 9
    assert sorted(load.replica for load in loads) == [0] * 3 + [1] * 3 + [2] * 3
    for load in loads:
        if load.replica == 1:
            router.begin(load)  # what runs weighs less than what waits
    assert router.place([], 10).replica == 1


def test_the_load_of_a_preferred_replica_is_bounded() -> None:
    router, keys = Router(4, 1_000_000, 10_000), prefix_keys(prompt(0, 1000))
    length = 1000 * FINE_TOKENS + 500
    placed = [router.place(keys, length) for _ in range(400)]
    queued = [0.0] * 4
    for load in placed:
        queued[load.replica] += load.num_uncached
    assert max(queued) <= most_load(sum(queued) / 4) + length
    assert max(queued) > SLACK_TOKENS


def test_full_replaced_and_lost_replicas_are_avoided() -> None:
    router = Router(3, 10_000, 2)
    router.set_state(2, LOST)
    loads = [router.place([], 100) for _ in range(4)]
    assert sorted(load.replica for load in loads) == [0, 0, 1, 1]  # both are full
    router.set_state(0, REPLACED)
    assert {router.place([], 1000).replica for _ in range(3)} == {1}
    router.set_state(1, REPLACED)
    assert router.place([], 1).replica in (0, 1)
    router.set_state(0, 0.0)
    assert {router.place([], 1).replica for _ in range(9)} == {0}


def test_nothing_is_left_when_all_requests_have_ended() -> None:
    rng, router, loads = random.Random(1), Router(5, 10_000, 8), []
    for _ in range(500):
        if loads and rng.random() < 0.5:
            load, number = loads.pop(rng.randrange(len(loads)))
            if rng.random() < 0.8:
                router.begin(load)
            for _ in range(number - 1):
                router.end(load, 1, is_last=False)
            router.end(load, 1)
        else:
            number = rng.randint(1, 3)
            keys = prefix_keys(prompt(rng.randrange(5), rng.randint(1, 4)))
            owner, weight = rng.choice([("a", 1.0), ("b", 2.5)])
            load = router.place(keys, rng.randint(1, 300), owner, number, weight=weight)
            loads.append((load, number))
    for load, number in loads:
        router.end(load, number)
    assert router._queued == router._running == router._bases == [0.0] * 5
    assert router._num_requests == [0] * 5 and router._total == 0.0
    assert router._owners == {} and router._weights == [0.0] * 5


def test_a_flood_of_one_owner_does_not_repel_another_from_its_prefix() -> None:
    router, keys = Router(2, 100_000, 64), prefix_keys(prompt(0, 20))
    router.end(router.place(keys, 20 * FINE_TOKENS, "b"))
    home = router.choose(keys, 20 * FINE_TOKENS, "b")[0]
    for i in range(1, 40):
        router.place(prefix_keys(prompt(i, 2)), 2 * FINE_TOKENS, "flood")
    assert router.choose(keys, 20 * FINE_TOKENS, "b") == (home, 20)


def test_each_owner_waits_on_every_replica() -> None:
    """Requests that arrive in turns: those of one owner must not all go to one replica, where its
    share would be that of the replica and not what its weight says.
    """
    router, queued = Router(2, 100_000, 4), {"a": [0.0, 0.0], "b": [0.0, 0.0]}
    for i in range(100):
        for owner, weight in (("a", 3.0), ("b", 1.0)):
            load = router.place(prefix_keys(prompt(i, 2)), 100, owner, weight=weight)
            queued[owner][load.replica] += load.num_uncached
    for tokens in queued.values():
        assert max(tokens) - min(tokens) <= 200


def test_a_prefix_attracts_when_all_replicas_are_full() -> None:
    router = Router(4, 100_000, 2)
    for _ in range(16):
        router.begin(router.place([], 100, "flood"))
    router.set_state(3, REPLACED)
    length = 20 * FINE_TOKENS
    for replica in range(4):
        keys = prefix_keys(prompt(replica, 20))
        router.end(router.place(keys, length, "b", replica=replica))
        assert (router.choose(keys, length + 50, "b")[0] == replica) == (replica != 3)


def test_an_owner_with_its_share_of_a_full_replica_goes_to_another() -> None:
    """Tokens do not tell how long a slot is waited for."""
    router, keys, length = Router(2, 100_000, 4), prefix_keys(prompt(0, 20)), 20 * FINE_TOKENS
    for _ in range(16):
        router.place([], 100, "flood")
    router.end(router.place(keys, length, "b", replica=0))
    assert [router.place(keys, length + 5, "b").replica for _ in range(4)] == [0, 0, 1, 1]
