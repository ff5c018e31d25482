"""Whose turn it is: the queue alone, and random workloads of several owners."""

import random
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.core.request import Request
from quire.core.scheduling.owners import WaitingQueue
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams
from quire.tests.core.scheduling.loop import Loop, distinct


def add(queue: WaitingQueue, place: int, name: str, weight: float = 1.0) -> Request:
    message = EngineCoreRequest(f"{name}{place}", [1] * 10, SamplingParams(seed=0, max_tokens=5))
    owner = queue.enter(0, name, weight)
    request = Request(message, max_model_len=100, key=(0, place), owner=owner)
    queue.add(request)
    return request


def start(queue: WaitingQueue, num_tokens: int) -> str:
    """Start the next request, compute tokens of it, and return its id."""
    request = queue.next({})
    queue.start(request)
    request.num_computed_tokens = num_tokens
    queue.charge(request, num_tokens)
    return request.request_id


def test_one_owner_is_served_in_order():
    queue = WaitingQueue(max_debt=100)
    for place in (2, 0, 3, 1):
        add(queue, place, "a")
    assert [request.key[1] for request in queue] == [0, 1, 2, 3]
    assert [start(queue, 10 * i) for i in range(4)] == ["a0", "a1", "a2", "a3"]
    assert not queue and queue.next({}) is None


def test_the_owner_with_the_least_service_for_its_weight_is_next():
    queue = WaitingQueue(max_debt=100)
    for place in range(20):
        add(queue, place, "a")
        add(queue, 20 + place, "b", weight=3.0)
    started = [start(queue, 30) for _ in range(20)]
    assert [name[0] for name in started].count("b") == 15
    assert [name for name in started if name[0] == "a"] == [f"a{i}" for i in range(5)]


def test_an_owner_that_was_away_has_no_credit_and_little_debt():
    queue = WaitingQueue(max_debt=100)
    for place in range(10):
        add(queue, place, "a")
    for _ in range(5):
        start(queue, 1000)
    for place in range(10, 12):
        add(queue, place, "late")
    # it is next, but not until it has received 5000 tokens, too
    assert [start(queue, 1000)[0] for _ in range(5)] == ["l", "a", "l", "a", "a"]
    queue.owners[(0, "a")].served += 5000  # while nobody else waits
    for request in list(queue):
        queue.remove(request)
    add(queue, 20, "late")
    late = add(queue, 21, "a").owner
    assert late.served <= queue.owners[(0, "late")].served + 100


def test_recomputed_tokens_are_not_charged():
    queue = WaitingQueue(max_debt=100)
    request = add(queue, 0, "a")
    request.num_computed_before_preemption = 50
    request.num_computed_tokens = 40
    queue.charge(request, 40)
    assert request.owner.served == 0
    request.num_computed_tokens = 70
    queue.charge(request, 30)
    assert request.owner.served == 20


def test_an_owner_is_forgotten_with_its_last_request():
    loop = Loop()
    loop.add("0", distinct(0, 20), client_index=3, owner="x")
    loop.add("1", distinct(1, 20), client_index=4, owner="x")
    assert list(loop.scheduler.waiting.owners) == [(3, "x"), (4, "x")]
    loop.run()
    assert not loop.scheduler.waiting.owners


MAX_PROMPT, MAX_OUTPUT = 60, 20


WORKLOADS = given(
    seed=st.integers(0, 2**32),
    num_owners=st.integers(2, 4),
    max_num_seqs=st.sampled_from([1, 4, 8]),
    budget=st.sampled_from([32, 256]),
    spare_blocks=st.sampled_from([0, 20, 300]),
)


@settings(max_examples=2, deadline=None, derandomize=True)
@WORKLOADS
def test_no_owner_starves(**workload):
    assert_no_owner_starves(**workload)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, derandomize=True)
@WORKLOADS
def test_no_owner_starves_in_more_workloads(**workload):
    assert_no_owner_starves(**workload)


def assert_no_owner_starves(
    seed: int, num_owners: int, max_num_seqs: int, budget: int, spare_blocks: int
) -> None:
    """While two owners wait, their service for their weight differs by at most what is running:
    what was started in turn is computed to its end.
    """
    rng = random.Random(seed)
    loop = Loop(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=17 + spare_blocks,
        preemption_mode=rng.choice(["recompute", "swap"]),
    )
    weights = [rng.choice([1.0, 1.0, 2.0]) for _ in range(num_owners)]
    owners = {}
    for i in range(120):
        # the first owner floods, before the others and with longer requests
        index = 0 if i < 40 else rng.randrange(num_owners)
        length = MAX_PROMPT if index == 0 else rng.randint(1, MAX_PROMPT)
        owners[str(i)] = index
        loop.add(
            str(i),
            distinct(i, length),
            max_tokens=rng.randint(1, MAX_OUTPUT),
            priority=rng.randint(-2, 2),
            owner=f"owner {index}",
            owner_weight=weights[index],
        )
    computed, since = [0.0] * num_owners, {}
    most = 2 * (max_num_seqs * (MAX_PROMPT + MAX_OUTPUT) + budget)
    farthest = dict.fromkeys(owners, 0)
    while loop.scheduler.has_unfinished_requests():
        waiting = {request.owner.identity[1] for request in loop.scheduler.waiting}
        assert loop.step(), loop.scheduler.state()
        for request_id, request in loop.scheduler.requests.items():
            new = max(0, request.num_computed_tokens - farthest[request_id])
            computed[owners[request_id]] += new / weights[owners[request_id]]
            farthest[request_id] += new
        for a, b in combinations(range(num_owners), 2):
            if f"owner {a}" in waiting and f"owner {b}" in waiting:
                lag = computed[a] - computed[b]
                assert abs(lag - since.setdefault((a, b), lag)) <= most
            else:
                since.pop((a, b), None)
    assert len(loop.ends) == 120


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priorities_order_the_requests_of_one_owner_only(policy):
    loop = Loop(max_num_seqs=1, scheduling_policy=policy)
    for i in range(4):
        loop.add(f"a{i}", distinct(i, 20), priority=-i, owner="a", max_tokens=4)
        loop.add(f"b{i}", distinct(4 + i, 20), priority=9, owner="b", max_tokens=4)
    loop.run()
    ends = list(loop.ends)
    assert [name[0] for name in ends] == ["a", "b"] * 4
    mine = [name for name in ends if name[0] == "a"]
    assert mine == (["a3", "a2", "a1", "a0"] if policy == "priority" else ["a0", "a1", "a2", "a3"])
