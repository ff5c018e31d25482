"""Owners in the background: what lines of batches compute beside requests of others."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.core.scheduling.shares import LINGERING_STEPS, ROWS_PER_TOKEN, STEPS_PER_TURN
from quire.frontend.server.batch_runner import WEIGHT
from quire.tests.core.scheduling.loop import Loop, distinct


def add_line(loop: Loop, number: int, length: int = 30, max_tokens: int = 200, **fields) -> None:
    text = distinct(number, length)
    fields = {"owner": "batch:", "owner_weight": WEIGHT} | fields
    loop.add(f"line{number}", text, max_tokens=max_tokens, **fields)


def lines_of(step: dict[str, int]) -> dict[str, int]:
    return {name: number for name, number in step.items() if name.startswith("line")}


def linger(loop: Loop) -> None:
    for _ in range(LINGERING_STEPS):
        assert sum(loop.step().values()) == 1


def test_alone_lines_fill_steps_of_a_bounded_size():
    loop = Loop(
        max_num_seqs=128,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=600,
        enable_prefix_caching=False,
    )
    for i in range(120):
        add_line(loop, i)
    linger(loop)
    most = loop.scheduler.limits.max_background_tokens
    assert [sum(loop.step().values()) for _ in range(20)] == [most] * 20
    # others have the budget
    loop.add("a", [96] * 200, owner="a", max_tokens=1)
    assert loop.step() == {"a": 200}


def test_lines_pause_while_others_have_a_prompt_and_are_few_beside_decodes():
    loop = Loop(max_num_seqs=32, max_num_batched_tokens=16, num_gpu_blocks_override=600)
    for i in range(20):
        add_line(loop, i, length=2)
    linger(loop)
    for _ in range(4):
        loop.step()
    assert len(lines_of(loop.step())) > 8
    loop.add("a", distinct(50, 40), max_tokens=20)
    steps = [loop.step() for _ in range(6)]
    assert steps[:3] == [{"a": 16}, {"a": 16}, {"a": 8}]
    assert all(step["a"] == 1 and len(lines_of(step)) == 1 for step in steps[3:])
    num_others = 3 * ROWS_PER_TOKEN
    for i in range(1, num_others):
        loop.add(f"a{i}", distinct(50 + i, 2), max_tokens=20)
    while loop.scheduler.waiting.owners[(0, "")].waiting or len(loop.step()) == num_others:
        loop.step()
    assert len(lines_of(loop.step())) == 3


def test_lines_leave_their_slots_and_get_back_what_others_leave():
    loop = Loop(max_num_seqs=4, max_num_batched_tokens=64)
    for i in range(20):
        add_line(loop, i)
    linger(loop)
    for _ in range(4):
        loop.step()
    assert len(lines_of(loop.step())) == 4
    for i in range(3):
        loop.add(f"a{i}", distinct(50 + i, 40), max_tokens=10)
        step = loop.step()
        assert step[f"a{i}"] == 40 and not lines_of(step)
    assert loop.scheduler.stats().num_preemptions == 3
    while "a2" not in loop.ends:
        loop.step()
    linger(loop)
    loop.step()
    assert len(lines_of(loop.step())) == 4


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_lines_end_under_a_load_that_never_ends(max_num_seqs):
    """Others have a prompt to compute in every step, and more of them wait than there are slots."""
    loop = Loop(max_num_seqs=max_num_seqs, max_num_batched_tokens=16)
    add_line(loop, 0, length=10, max_tokens=10)
    num_others = num_steps = 0
    while "line0" not in loop.ends:
        while len(loop.scheduler.waiting) < 6:
            loop.add(f"a{num_others}", distinct(num_others, 30), max_tokens=2)
            num_others += 1
        loop.step()
        num_steps += 1
        assert num_steps < 2 * STEPS_PER_TURN * 20
    assert num_steps > STEPS_PER_TURN


def test_lines_of_several_keys_take_turns():
    loop = Loop(max_num_seqs=8)
    loop.add("a", distinct(9, 4), max_tokens=120)
    add_line(loop, 0, length=4, max_tokens=1000, owner="batch:1")
    add_line(loop, 1, length=90, max_tokens=1000, owner="batch:2")
    loop.step()
    names = [name for _ in range(60) for name in lines_of(loop.step())]
    assert len(names) == 60
    assert 25 <= names.count("line1") <= 35


def test_lines_that_hold_what_others_wait_for_go_on():
    """One line holds nearly all blocks, and is its owner's only one, which is not preempted."""
    loop = Loop(num_gpu_blocks_override=17, max_num_seqs=4, enable_prefix_caching=False)
    add_line(loop, 0, length=180, max_tokens=40)
    for _ in range(LINGERING_STEPS + 10):
        loop.step()
    loop.add("a", distinct(1, 120), max_tokens=4)
    loop.run()
    assert len(loop.ends) == 2


def test_a_prompt_that_cannot_be_split_is_computed_at_once():
    loop = Loop(enable_chunked_prefill=False, max_num_batched_tokens=300, max_num_seqs=4)
    add_line(loop, 0, length=40, max_tokens=4)
    assert loop.step() == {"line0": 40}
    loop.add("a", distinct(1, 60), max_tokens=4)
    add_line(loop, 1, length=40, max_tokens=4)
    assert loop.step() == {"a": 60}
    loop.run()
    assert len(loop.ends) == 3


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    budget=st.sampled_from([16, 64, 300]),
    caches=st.booleans(),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_first_tokens_beside_a_batch(seed, budget, caches, policy):
    """Others get their first token in the same steps as without a batch, but for the turns of the
    batch, and these steps compute hardly more tokens. Every line has the tokens that it has alone.
    """
    rng = random.Random(seed)
    num_steps, arrivals = 0, []
    for i in range(12):
        num_steps += rng.choice([0, 1, 1, 4, 16])
        length, max_tokens = rng.choice([4, 30, 120]), rng.randint(1, 20)
        arrivals.append((num_steps, f"a{i}", length, max_tokens, rng.randint(-1, 1)))

    def run(has_batch: bool) -> tuple[Loop, dict[str, int], dict[str, int]]:
        loop = Loop(
            max_num_seqs=64,
            max_num_batched_tokens=budget,
            num_gpu_blocks_override=300,
            enable_prefix_caching=caches,
            scheduling_policy=policy,
        )
        if has_batch:
            for i in range(16):
                add_line(loop, i, length=1 + i % 20, max_tokens=12, owner=f"batch:{i % 2}")
        first, cost, total, place = {}, {}, 0, 0
        while place < len(arrivals) or loop.scheduler.has_unfinished_requests():
            while place < len(arrivals) and arrivals[place][0] <= loop_steps[has_batch]:
                _, name, length, max_tokens, priority = arrivals[place]
                loop.add(name, distinct(place, length), max_tokens=max_tokens, priority=priority)
                cost[name], place = total, place + 1
            step = loop.step()
            assert step or not loop.scheduler.has_unfinished_requests()
            total += sum(step.values())
            loop_steps[has_batch] += 1
            for name in cost.keys() - first.keys():
                if loop.tokens.get(name):
                    first[name] = loop_steps[has_batch]
                    cost[name] = total - cost[name]
        return loop, first, cost

    loop_steps = {False: 0, True: 0}
    idle, idle_first, idle_cost = run(False)
    busy, busy_first, busy_cost = run(True)
    for name in idle_first:
        late = busy_first[name] - idle_first[name]
        assert late <= 1 + (idle_first[name] // STEPS_PER_TURN)
        assert busy_cost[name] <= 1.2 * idle_cost[name] + late * budget + 2
        assert busy.tokens[name] == idle.tokens[name]
    alone = Loop(max_num_seqs=64, num_gpu_blocks_override=300)
    for i in range(16):
        add_line(alone, i, length=1 + i % 20, max_tokens=12)
    alone.run()
    assert {name: alone.tokens[name] for name in alone.tokens} == {
        name: tokens for name, tokens in busy.tokens.items() if name.startswith("line")
    }
