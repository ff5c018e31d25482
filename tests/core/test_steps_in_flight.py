"""Stages: as many steps are in flight as a model has stages, of different requests."""

from __future__ import annotations

from collections import deque

import pytest
from quire.core.engine_core import EngineCore
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from quire.tests.core.engine_loop import (
    Answer,
    assert_nothing_left,
    collect,
    greedy,
    run,
    step,
)
from quire.tests.fakes import FakeExecutor, expected_output, make_config


class StagesExecutor(FakeExecutor):
    """Runs a step when its result is read, and checks that no step in flight samples a token that
    a later one needs.
    """

    def __init__(self, config):
        super().__init__(config)
        self.in_flight: deque[SchedulerOutput] = deque()
        self.num_in_flight: list[int] = []  # with each step that is submitted
        self.lengths: dict[int, int] = {}  # of the tokens in each slot

    def submit_model(self, step: SchedulerOutput) -> InFlight:
        for slot in step.freed_slots:
            del self.lengths[slot]
        for new in step.new_requests:
            self.lengths[new.slot] = len(new.token_ids)
        for slot, computed, count in zip(
            step.slots, step.num_computed_tokens, step.num_scheduled_tokens, strict=True
        ):
            assert computed + count <= self.lengths[slot], "a token that is not known yet"
        self.in_flight.append(step)
        self.num_in_flight.append(len(self.in_flight))
        return InFlight(self, step)

    def finish(self, step: SchedulerOutput) -> ModelRunnerOutput:
        assert self.in_flight.popleft() is step, "results are asked for in order"
        later = {slot for other in self.in_flight for slot in other.freed_slots}
        output = self.execute_model(step)
        for slot, count in zip(step.slots, output.num_sampled, strict=True):
            if slot not in later:
                self.lengths[slot] += count
        return output


class InFlight:
    def __init__(self, executor: StagesExecutor, step: SchedulerOutput):
        self.executor, self.step = executor, step

    def result(self) -> ModelRunnerOutput:
        return self.executor.finish(self.step)


def make_core(num_stages: int = 2, least_samples: int = 1, **arguments) -> EngineCore:
    config = make_config(pipeline_parallel_size=num_stages, **arguments)
    core = EngineCore(config, StagesExecutor(config), check_every_step=True)
    core.scheduler.limits.least_samples = least_samples
    return core


def take_steps(core: EngineCore, count: int, answers: dict[str, Answer]) -> None:
    for _ in range(count):
        for outputs in step(core).values():
            collect(outputs, answers)


def request(request_id: str, prompt: list[int] | None = None, **params) -> EngineCoreRequest:
    return EngineCoreRequest(request_id, prompt or [len(request_id), 2, 3], greedy(**params))


@pytest.mark.parametrize(("num_stages", "sizes"), [(2, {4}), (3, {2, 3}), (8, {1})])
def test_the_batch_is_divided_among_the_steps_in_flight(num_stages, sizes):
    core = make_core(num_stages)
    for i in range(8):
        core.add_request(request(f"r{i}", [i + 1, 2, 3], max_tokens=30))
    answers = run(core)[0]
    for i in range(8):
        wanted = expected_output([i + 1, 2, 3], greedy(max_tokens=30), [], core.config)
        assert answers[f"r{i}"].tokens == wanted[0]
    executor = core.executor
    assert {len(one.slots) for one in executor.steps} == sizes
    # except while the first ones are submitted and the last ones finish
    assert executor.num_in_flight[num_stages - 1 : -num_stages] == [num_stages] * (
        len(executor.steps) - 2 * num_stages + 1
    )
    assert_nothing_left(core)


@pytest.mark.parametrize(
    ("num_requests", "quantization", "sizes"),
    [(8, None, {8}), (8, "int4", {4}), (12, "int8", {8, 4}), (24, None, {12})],
)
def test_few_requests_are_in_one_step(num_requests, quantization, sizes):
    """As many as take about as long as half of them."""
    config = make_config(
        pipeline_parallel_size=2, quantization=quantization, max_num_seqs=num_requests
    )
    core = EngineCore(config, StagesExecutor(config))
    for i in range(num_requests):
        core.add_request(request(f"r{i}", [i + 1, 2], max_tokens=6))
    assert {len(one.tokens) for one in run(core)[0].values()} == {6}
    assert {len(one.slots) for one in core.executor.steps} == sizes
    assert_nothing_left(core)


def test_one_request_has_one_step_in_flight_and_its_prompt_several():
    core = make_core(2, max_num_batched_tokens=16)
    core.add_request(request("r", list(range(1, 81)), max_tokens=4))
    run(core)
    assert [len(one.new_requests) for one in core.executor.steps] == [1] + [0] * 7
    assert core.executor.num_in_flight == [1, 2, 2, 2, 2, 1, 1, 1]
    assert_nothing_left(core)


def test_a_long_prompt_is_in_several_steps_at_once():
    core = make_core(2, max_model_len=1024)
    core.add_request(request("r", list(range(1, 91)) * 8, max_tokens=1))
    run(core)
    assert [one.num_scheduled_tokens for one in core.executor.steps] == [[256], [256], [208]]
    assert core.executor.num_in_flight == [1, 2, 2]
    assert_nothing_left(core)


def test_prompts_that_are_computed_in_parts_do_not_keep_others_waiting():
    """A prompt has a row in every step in flight; every decode has its turn in each two steps."""
    core = make_core(2, max_num_batched_tokens=16, long_prefill_token_threshold=4)
    for i in range(3):
        core.add_request(request(f"short{i}", [i + 1], max_tokens=40))
    core.add_request(request("long", list(range(1, 90)), max_tokens=2))
    answers: dict[str, Answer] = {}
    take_steps(core, 5, answers)
    before = len(core.executor.steps)
    take_steps(core, 12, answers)
    slots = {core.scheduler.requests[f"short{i}"].slot for i in range(3)}
    counts = [sum(slot in one.slots for one in core.executor.steps[before:]) for slot in slots]
    assert min(counts) >= 5
    run(core, {0: answers})
    assert {name: len(one.tokens) for name, one in answers.items()} == {
        "short0": 40,
        "short1": 40,
        "short2": 40,
        "long": 2,
    }
    assert_nothing_left(core)


def test_batches_become_equal_again_when_requests_end():
    core = make_core(2)
    for i in range(8):
        # those of one batch end early
        core.add_request(request(f"r{i}", [i + 1], max_tokens=40 if i >= 3 else 3))
    run(core)
    sizes = [len(one.slots) for one in core.executor.steps[10:40]]
    assert set(sizes) == {2, 3}
    assert_nothing_left(core)


def test_a_request_that_is_preempted_in_flight_gets_its_token_and_starts_later():
    core = make_core(3)
    for i in range(3):
        core.add_request(request(f"r{i}", [i + 1], max_tokens=9))
    answers: dict[str, Answer] = {}
    while len(core.executor.in_flight) < 2:
        take_steps(core, 1, answers)
    scheduler = core.scheduler
    victim = scheduler.running[-1]
    assert victim.num_pending_tokens == 1
    scheduler.preempt(scheduler.running.pop())
    scheduled = scheduler.schedule()
    assert scheduled is None or victim not in scheduled.requests
    assert scheduled is None, "all others have tokens pending"
    run(core, {0: answers})
    for i in range(3):
        wanted = expected_output([i + 1], greedy(max_tokens=9), [], core.config)
        assert answers[f"r{i}"].tokens == wanted[0]
    assert core.observer.get_metrics()["num_preemptions"] == 1
    assert_nothing_left(core)


def test_aborts_and_drained_utilities_with_steps_in_flight():
    core = make_core(2)
    for i in range(4):
        core.add_request(request(f"r{i}", [i + 1], max_tokens=20))
    answers: dict[str, Answer] = {}
    take_steps(core, 4, answers)
    assert len(core.executor.in_flight) == 1
    core.abort_requests(["r0", "r3"])
    core.call_utility("execute_dummy_batch", [])
    assert not core.executor.in_flight
    run(core, {0: answers})
    assert {name: one.reason for name, one in answers.items()} == {
        "r0": FinishReason.ABORT,
        "r1": FinishReason.LENGTH,
        "r2": FinishReason.LENGTH,
        "r3": FinishReason.ABORT,
    }
    assert_nothing_left(core)
