"""Resubmission against a simulated engine: the request that ends engines is found, and no other
request ends.
"""

from __future__ import annotations

import random

import pytest
from quire.frontend.supervision.resubmission import PROBATION_TOKENS, Entry, Resubmission
from quire.ipc.messages import EngineCoreOutputs, EngineCoreRequest, Finished, FinishReason
from quire.ipc.params import SamplingParams, StructuredOutputsParams

LENGTH = 200


class Simulation:
    """An engine that gives each submitted request a token per step, in bursts of up to `burst`, and
    dies in the step that would give request `poison` its token number `position`.
    """

    def __init__(self, seed: int, num_requests: int, *, is_killed: bool = False, burst: int = 1):
        self.rng = random.Random(seed)
        self.resubmission, self.is_killed, self.burst = Resubmission(), is_killed, burst
        self.entries: dict[str, Entry] = {}
        for i in range(num_requests):
            request = EngineCoreRequest(f"r{i}", [1], SamplingParams(seed=0, max_tokens=LENGTH))
            tokens = [0] * self.rng.choice([0, 0, self.rng.randrange(LENGTH // 2)])
            self.entries[request.request_id] = (request, tokens)
        self.submitted = set(self.entries)
        self.poison: dict[str, int] = {}
        self.num_deaths = 0
        self.convicted: list[str] = []

    def die(self) -> None:
        self.num_deaths += 1
        assert self.num_deaths < 100
        entries = list(self.entries.values())
        culprit = self.resubmission.on_death(entries, is_killed=self.is_killed)
        if culprit is not None:
            self.convicted.append(culprit[0].request_id)
            del self.entries[culprit[0].request_id]
        self.submitted = {request.request_id for request, _ in self.resubmission.due()}

    def step(self) -> None:
        """One step: everything that is submitted gets tokens, or the engine dies."""
        order = sorted(self.submitted & set(self.entries))
        count = self.rng.randint(1, self.burst)
        for request_id in order:
            position = self.poison.get(request_id)
            if position is not None and len(self.entries[request_id][1]) + count > position:
                return self.die()
        ids, first, finished = [], [], []
        for row, request_id in enumerate(order):
            tokens = self.entries[request_id][1]
            ids.append(request_id)
            first.append(len(tokens))
            tokens += [0] * count
            if len(tokens) >= LENGTH:
                finished.append(Finished(row, FinishReason.LENGTH))
        outputs = EngineCoreOutputs(
            0, ids, first, [count] * len(ids), [0] * (count * len(ids)), finished
        )
        self.resubmission.take(outputs)
        for end in finished:
            del self.entries[ids[end.row]]
        self.submitted |= {request.request_id for request, _ in self.resubmission.due()}

    def run(self) -> None:
        while self.entries:
            before = len(self.submitted & set(self.entries))
            self.step()
            assert before or self.submitted, "nothing is submitted, and nothing will be"


@pytest.mark.parametrize("burst", [1, 8])
@pytest.mark.parametrize("is_killed", [False, True])
def test_one_poison_is_found_and_no_other_request_ends(is_killed: bool, burst: int) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        run = Simulation(seed, rng.choice([1, 2, 5, 32]), is_killed=is_killed, burst=burst)
        culprit = rng.choice(sorted(run.entries))
        run.poison[culprit] = len(run.entries[culprit][1]) + rng.choice([0, 0, 1, 3, 20, 60])
        run.run()
        assert run.convicted == [culprit], seed
        assert run.num_deaths <= 9 + 3 * is_killed, seed


def test_a_new_request_that_dies_of_its_prompt_ends_after_two_deaths() -> None:
    run = Simulation(0, 31)
    for _, tokens in run.entries.values():
        tokens += [0] * 40
    run.entries["new"] = (EngineCoreRequest("new", [1], SamplingParams(seed=0)), [])
    run.submitted.add("new")
    run.poison["new"] = 0
    run.run()
    assert (run.convicted, run.num_deaths) == (["new"], 2)


def test_several_poisons_are_found_one_after_the_other() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        run = Simulation(seed, 16)
        culprits = rng.sample(sorted(run.entries), 3)
        for culprit in culprits:
            run.poison[culprit] = len(run.entries[culprit][1]) + rng.choice([0, 2])
        run.run()
        assert sorted(run.convicted) == sorted(culprits), seed


def test_deaths_with_progress_in_between_end_no_request() -> None:
    for seed in range(30):
        run = Simulation(seed, 32)
        rng = random.Random(seed)
        for _ in range(20):
            run.die()
            while run.resubmission.is_active:
                run.step()
            for _ in range(rng.randint(PROBATION_TOKENS, 60)):
                run.step()
        run.run()
        assert run.convicted == []


def test_the_only_suspect_beside_other_requests_is_tried_alone_before_it_ends() -> None:
    """It is the one that was submitted last, and has not 32 tokens yet when another cause ends the
    engine again.
    """
    run = Simulation(0, 3)
    run.die()
    while run.resubmission.is_active:
        run.step()
    for name, (_, tokens) in run.entries.items():
        tokens += [0] * (10 if name == "r2" else 40)
    run.die()
    assert run.convicted == [] and run.submitted == {"r2"}
    run.die()
    assert run.convicted == ["r2"]


def test_deaths_without_progress_end_no_request_that_was_never_alone() -> None:
    for seed in range(100):
        run, rng = Simulation(seed, 32), random.Random(seed)
        while len(run.entries) >= 4:
            run.die()
            while run.resubmission.is_active:
                run.step()
            for _ in range(rng.randint(1, 40)):
                run.step()
        run.run()
        assert run.convicted == [], seed


def test_kills_from_outside_end_no_request_that_was_alone_twice() -> None:
    run = Simulation(0, 8, is_killed=True)
    for _ in range(4):  # at the last two, one request is alone in the engine
        run.die()
    assert run.convicted == [] and len(run.submitted) == 1
    run.run()
    run = Simulation(0, 1, is_killed=True)
    for _ in range(3):
        run.die()
    assert run.convicted == ["r0"]


def test_grammars_come_last() -> None:
    """Their check takes long in a new engine."""
    resubmission = Resubmission()
    grammar = SamplingParams(seed=0, structured_outputs=StructuredOutputsParams(regex="a+"))
    params = [grammar, SamplingParams(seed=0)] * 3
    entries: list[Entry] = [
        (EngineCoreRequest(f"r{i}", [1], params[i]), [0] * (i % 3)) for i in range(6)
    ]
    resubmission.on_death(entries)
    order: list[str] = []
    while (due := resubmission.due()) or resubmission.is_active:
        order += [request.request_id for request, _ in due]
        resubmission.drop(order)  # as if they had ended
    assert order == ["r3", "r1", "r5", "r2", "r4", "r0"]


def test_a_request_that_no_engine_received_is_no_suspect() -> None:
    entries: list[Entry] = [(EngineCoreRequest("r", [1], SamplingParams(seed=0)), [])]
    resubmission = Resubmission()
    resubmission.note_unsent("r")
    assert resubmission.on_death(entries) is None  # of an engine that had no request
    assert resubmission.due() == entries
    assert resubmission.on_death(entries) is None
    assert resubmission.due() == entries
    assert resubmission.on_death(entries) is entries[0]


def test_completions_of_a_request_that_waits_are_no_suspects() -> None:
    """It waits as one request; after the next death the journal has its completions."""
    params = SamplingParams(seed=0)
    poison: Entry = (EngineCoreRequest("r", [1], params), [])
    late: list[Entry] = [(EngineCoreRequest(f"{i}_late", [1], params), []) for i in range(2)]
    resubmission = Resubmission()
    resubmission.on_death([poison])
    assert resubmission.due() == [poison]
    resubmission.add(EngineCoreRequest("late", [1], SamplingParams(seed=0, n=2)))
    assert resubmission.on_death([poison, *late]) is poison
    assert resubmission.due() == late[:1]
    resubmission.take(EngineCoreOutputs(0, ["0_late"], [0], [1], [5], []))
    assert resubmission.due() == late[1:]
    assert resubmission.on_death(late) is None


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_request_whose_grammar_is_checked_is_no_suspect(is_admitted: bool) -> None:
    grammar = SamplingParams(seed=0, structured_outputs=StructuredOutputsParams(regex="a+"))
    entries: list[Entry] = [(EngineCoreRequest("r", [1], grammar), [])]
    resubmission = Resubmission()
    for _ in range(4):
        assert resubmission.on_death(entries) is None
        assert resubmission.due() == entries and not resubmission.is_active
    if is_admitted:
        resubmission.take(EngineCoreOutputs(0, ["r"], [0], [0], [], []))
    assert (resubmission.on_death(entries) is None) == (not is_admitted)


def test_a_new_request_waits_behind_those_that_are_resubmitted() -> None:
    run = Simulation(3, 4)
    run.die()
    run.resubmission.add(late := EngineCoreRequest("late", [1], SamplingParams(seed=0)))
    assert "late" not in run.submitted
    run.entries["late"] = (late, [])
    while run.resubmission.is_active:
        run.step()
    assert run.submitted >= {"r0", "r1", "r2", "r3", "late"}


def test_aborted_requests_are_not_waited_for() -> None:
    resubmission = Resubmission()
    entries: list[Entry] = [
        (EngineCoreRequest(f"r{i}", [1], SamplingParams(seed=0)), []) for i in range(3)
    ]
    resubmission.on_death(entries)
    assert [request.request_id for request, _ in resubmission.due()] == ["r0"]
    assert resubmission.due() == []
    resubmission.drop(["r0", "r1"])
    assert [request.request_id for request, _ in resubmission.due()] == ["r2"]
    assert not resubmission.is_active
