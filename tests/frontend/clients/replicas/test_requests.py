"""Where each request is."""

from __future__ import annotations

import random

from quire.frontend.clients.replicas.requests import PlacedRequests
from quire.frontend.clients.replicas.routing import Router
from quire.frontend.supervision.resubmission import PROBATION_TOKENS
from quire.ipc.lora import LoRARequest
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams


def request(name: str, n: int = 1, **fields) -> EngineCoreRequest:
    params = SamplingParams(n=n, max_tokens=100, seed=0)
    return EngineCoreRequest(name, [ord(name[-1])] * 200, params, **fields)


def test_requests_and_completions_end_once() -> None:
    placed = PlacedRequests(Router(2, 10_000, 64))
    router = placed.router
    replica = placed.place(request("a", 3))
    assert placed.replica_of("a") == placed.replica_of("1_a") == replica
    assert placed.abort(["1_a", "nobody"]) == {replica: ["1_a"]}
    placed.end("1_a")  # the engine's last row of it
    assert router.num_requests(replica) == 2
    placed.begin("0_a")
    placed.end("0_a")
    assert placed.abort(["a"]) == {replica: ["a"]}
    assert placed.find("2_a") is None and router.num_requests(replica) == 0
    assert router._bases == [0.0, 0.0]


def test_completions_that_move_are_requests_of_their_own() -> None:
    placed = PlacedRequests(Router(2, 10_000, 64))
    placed.place(request("a", 2))
    placed.end("0_a")
    entry = request("1_a"), list(range(50))
    assert not placed.is_suspect(entry)
    placed.release([entry])
    placed.place(request("1_a", resume_tokens=entry[1]), num_moved_tokens=50)
    replica = placed.replica_of("1_a")
    assert placed.is_suspect(entry)
    assert not placed.is_suspect((entry[0], [0] * (50 + PROBATION_TOKENS)))
    assert placed.abort(["a"]) == {replica: ["1_a"]}  # the session knows its parent
    assert placed.router._num_requests == [0, 0] and not placed._children


def test_other_salts_and_adapters_share_no_prefix() -> None:
    placed = PlacedRequests(Router(2, 10_000, 64))
    placed.place(request("a"))
    table, seen = placed.router.prefixes, set()
    for number, fields in enumerate(
        ({}, {"cache_salt": "x"}, {"lora_request": LoRARequest("one", 1, "/one")})
    ):
        placed.place(request(f"{number}-a", **fields), 0)
        assert len(table._keys[0]) == 12 * (number + 1) or fields == {}
        seen |= set(table._keys[0])
    assert len(seen) == 36


def test_nothing_is_left_after_random_lives() -> None:
    rng = random.Random(3)
    placed = PlacedRequests(Router(3, 10_000, 8))
    alive: dict[str, list[str]] = {}
    for i in range(300):
        name, n = f"r{i}", rng.choice([1, 1, 3])
        placed.place(request(name, n))
        alive[name] = [name] if n == 1 else [f"{k}_{name}" for k in range(n)]
        for key in rng.sample(sorted(alive), min(len(alive), 2)):
            match rng.randrange(4):
                case 0:
                    placed.abort([key])
                    del alive[key]
                case 1:
                    placed.begin(alive[key][0])
                    placed.end(alive[key].pop())
                    if not alive[key]:
                        del alive[key]
                case 2:
                    placed.release([(request(one), []) for one in alive[key]])
                    for one in alive[key]:
                        placed.place(request(one), num_moved_tokens=0)
    placed.abort(list(alive))
    assert not placed._placed and not placed._children
    assert placed.router._num_requests == [0] * 3 and placed.router._bases == [0.0] * 3
