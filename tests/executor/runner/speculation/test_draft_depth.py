"""How many tokens are drafted: by acceptance, by cost, never more than allowed."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
from quire.executor.runner.speculation.draft_depth import (
    CHOICES_SHARE,
    MOST_PASSES_WITHOUT,
    DraftDepth,
)
from quire.executor.runner.speculation.drafters import UntriedDrafts
from quire.executor.runner.speculation.pass_costs import PassCosts, cpu_clock, measure_costs
from quire.ipc.step_messages import SchedulerOutput

FLAT = {1: 1.0, 8: 1.2, 64: 5.0}  # seconds of a pass by its tokens
STEEP = {1: 1.0, 8: 8.0, 64: 64.0}
STEEP_MS = {1: 1e-3, 8: 7e-3}


def step(num_rows: int, lookahead: int = 7) -> SchedulerOutput:
    ones = [1] * num_rows
    return SchedulerOutput(
        0, list(range(num_rows)), ones, ones, [[]], num_lookahead_tokens=[lookahead] * num_rows
    )


def make_depth(
    costs: dict[int, float], most: int = 7, draft_costs: dict[int, float] | None = None
) -> DraftDepth:
    batch = SimpleNamespace(num_tokens=np.zeros(64), entries=np.ones(64, np.int64), num_added=1)
    drafting = None if draft_costs is None else PassCosts(draft_costs)
    return DraftDepth(most, batch, PassCosts(costs), drafting)  # type: ignore[arg-type]


def test_depth_follows_acceptance():
    depth = make_depth(FLAT)
    first = depth.choose(step(1))[0]
    for _ in range(20):
        depth.learn([0], [7], [7])
    assert depth.choose(step(1)) == [7] and first < 7
    for _ in range(60):
        depth.learn([0], [7], [0])
    assert depth.choose(step(1))[0] <= 1


def test_rows_that_cost_as_much_as_steps_are_not_drafted():
    depth = make_depth(STEEP)
    depth.learn([0], [7], [7])
    assert depth.choose(step(1)) == [0]


def test_a_large_batch_switches_it_off_and_a_row_without_lookahead_gets_none():
    depth = make_depth(FLAT)
    assert any(depth.choose(step(2))) and depth.choose(step(64)) == [0] * 64
    output = step(3)
    output.num_lookahead_tokens[1] = 0
    assert depth.choose(output)[1] == 0
    assert depth.choose(step(3, lookahead=0)) == [0, 0, 0]


def test_a_refused_request_is_tried_again_and_a_new_one_starts_afresh():
    depth = make_depth({1: 1.0, 2: 1.5, 8: 4.0})
    assert depth.choose(step(1))[0]  # from now on it knows the request
    for _ in range(60):
        depth.learn([0], [7], [0])
    chosen = []
    for _ in range(2 * MOST_PASSES_WITHOUT):
        chosen.append(depth.choose(step(1))[0])
        depth.learn_time(1, 1, 1, [], 1.0)
    assert sorted(set(chosen)) == [0, 1] and chosen.count(1) <= 2
    depth._batch.entries[0] += 1
    depth._batch.num_added += 1
    assert depth.choose(step(1)) == make_depth({1: 1.0, 2: 1.5, 8: 4.0}).choose(step(1))


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_the_host_takes_is_learned_and_forgotten():
    batch = SimpleNamespace(num_tokens=np.zeros(64), entries=np.ones(64, np.int64), num_added=1)
    depth = DraftDepth(7, batch, PassCosts({1: 1e-3, 8: 1.2e-3}), clock=Clock())
    assert depth.choose(step(1))[0] and depth.can_gain(1)
    for _ in range(40):
        depth.learn_time(1, 1, 1, [7], 1.2e-3 + 9e-3)  # nine milliseconds beside the model
    assert depth.choose(step(1)) == [0] and not depth.can_gain(1)
    assert depth.can_gain(4)  # of other numbers of rows nothing is known
    for _ in range(40):
        depth.learn_time(1, 1, 8, [], 8 * (1e-3 + 9e-3))  # passes without drafts have it, too
    assert depth.can_gain(1)
    for _ in range(40):
        depth.learn_time(1, 1, 8, [], 8 * 1e-3)
    tries = next(n for n in range(10_000) if any(depth.choose(step(1))))
    assert tries > 100  # it costs something to find out


def test_steps_with_a_prompt_count_as_time_but_teach_nothing():
    batch = SimpleNamespace(num_tokens=np.zeros(64), entries=np.ones(64, np.int64), num_added=1)
    for clock in (None, Clock()):
        depth = DraftDepth(7, batch, PassCosts(STEEP_MS), clock=clock)
        depth.learn([0], [7], [0])
        depth._idle_s, depth._idle_step = 0.01, (1, 1, 1)
        for _ in range(3):
            depth.learn_time(1, 512, 1, [], 0.5)
        assert depth._idle_s < 0 and depth.can_gain(1)


def test_choices_of_no_drafts_take_a_small_share_of_the_time():
    clock = Clock()

    class Found:
        """Takes a millisecond for drafts that are never right."""

        sees_every_pass = uses_blocks = False
        num_calls = 0

        def draft(self, slots, counts, room):
            self.num_calls += 1
            clock.now += 1e-3
            return [np.full(count, -1) for count in counts]

    found = Found()
    batch = SimpleNamespace(
        num_tokens=np.full(64, 9),
        token_ids=np.zeros((64, 9000), np.int32),
        entries=np.ones(64, np.int64),
        num_added=1,
    )
    untried = UntriedDrafts(found, batch)
    depth = DraftDepth(7, batch, PassCosts(STEEP_MS), clock=clock, untried=untried)
    depth.learn([0], [7], [0])
    for _ in range(1000):
        depth.choose(step(1))
        batch.num_tokens[0] += 8
        depth.learn_time(1, 1, 8, [], 8e-3)
    assert 8 * CHOICES_SHARE * 0.8 <= found.num_calls / 1000 <= 8 * CHOICES_SHARE * 1.2


def test_drafts_that_no_pass_verifies_tell_what_would_be_accepted():
    batch = SimpleNamespace(
        num_tokens=np.array([4]),
        token_ids=np.arange(100)[None],
        entries=np.ones(1, np.int64),
        num_added=1,
    )
    drafter = SimpleNamespace(draft=lambda slots, counts, room: [np.arange(4, 4 + counts[0])])
    untried = UntriedDrafts(drafter, batch)
    untried.find([0], 3)
    assert untried.take([0]) == ([], [], [])  # nothing has followed
    untried.find([0], 3)
    batch.num_tokens[0] = 6
    assert untried.take([0]) == ([0], [2], [2])
    assert untried.take([0]) == ([], [], [])
    batch.num_tokens[0] = 4
    untried.find([0], 5)
    batch.token_ids[0, 6], batch.num_tokens[0] = 7, 20
    assert untried.take([0]) == ([0], [5], [2])
    untried.find([0], 3)
    batch.entries[0], batch.num_tokens[0] = 2, 30  # another request
    assert untried.take([0]) == ([], [], [])


def test_a_text_that_repeats_itself_is_drafted_although_it_began_without_drafts():
    """Where a pass with drafts costs so much that only sure ones are worth it."""
    batch = SimpleNamespace(
        num_tokens=np.array([4]),
        token_ids=np.arange(1000)[None],
        entries=np.ones(1, np.int64),
        num_added=1,
    )

    def draft(slots, counts, room):
        first = batch.num_tokens[0]
        return [np.arange(first, first + count) for count in counts]

    untried = UntriedDrafts(SimpleNamespace(draft=draft), batch)
    depth = DraftDepth(7, batch, PassCosts({1: 1.0, 8: 6.0}), clock=Clock(), untried=untried)
    assert depth.choose(step(1)) == [0]
    batch.num_tokens[0] += 8
    assert depth.choose(step(1))[0] > 0


def test_costs_are_measured_in_turns_and_a_slow_pass_ends_them():
    now, runs = [0.0], []

    def run_pass(num_tokens: int) -> None:
        runs.append(num_tokens)
        disturbance = 0.5 if runs == [1] else 0.0
        now[0] += num_tokens * scale + disturbance

    def measure() -> dict[int, float]:
        return measure_costs(run_pass, counts, lambda: now[0])

    counts = [1, 2, 4, 8, 16, 32]
    scale = 1e-4
    costs = measure()
    assert list(costs) == counts[:4] and runs == counts[:4]  # the first pass used up the budget
    runs = [0]
    costs = measure()
    assert runs[1:7] == runs[7:13] == counts  # in turns
    assert all(
        runs.count(count) == 20 or runs.count(count) * count * scale > 0.04 for count in counts
    )
    assert all(abs(seconds - count * scale) < 1e-9 for count, seconds in costs.items())
    scale, runs = 1.0, [0]
    assert list(measure()) == counts[:4] and runs[1:] == counts[:4]


def test_the_time_of_several_threads_counts():
    """A thread that sleeps while another one works has not made a pass faster."""

    def run_pass(num_tokens: int) -> None:
        thread = threading.Thread(target=spin)
        thread.start()
        thread.join()

    def spin() -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < 0.004:
            pass

    assert measure_costs(run_pass, [1], cpu_clock(1))[1] < 0.001
    assert measure_costs(run_pass, [1], cpu_clock(2))[1] > 0.001


def test_drafts_that_cost_as_much_as_tokens_are_not_drafted():
    for seconds, is_worth in ((0.05, True), (1.0, False)):
        depth = make_depth(FLAT, draft_costs={1: seconds, 8: seconds})
        assert bool(depth.choose(step(1))[0]) is is_worth
    free, cheap = make_depth(FLAT), make_depth(FLAT, draft_costs={1: 0.1, 8: 0.1})
    for depth in (free, cheap):
        for _ in range(10):
            depth.learn([0], [4], [2])
    assert free.choose(step(1))[0] >= cheap.choose(step(1))[0] > 0


def test_each_request_tells_how_well_a_model_drafts():
    depth = make_depth(FLAT, draft_costs={1: 2.0, 8: 2.0})
    for entry in range(1, 5):
        depth._batch.entries[0] = entry
        assert depth.choose(step(1)) == [0]  # it cannot gain, however good it is
    cheap = make_depth(FLAT, draft_costs={1: 0.1, 8: 0.1})
    first = cheap._probability(0)
    for entry in range(1, 80):
        cheap._batch.entries[0] = entry
        assert cheap.choose(step(1))[0] >= 1
        cheap.learn([0], [4], [4])
    cheap._batch.entries[0] = 100
    assert cheap._probability(0) > max(0.85, first)
    plain = make_depth(FLAT)  # what one text repeats says nothing about the next
    for entry in range(1, 80):
        plain._batch.entries[0] = entry
        plain.learn([0], [4], [4])
    plain._batch.entries[0] = 100
    assert plain._probability(0) == first
