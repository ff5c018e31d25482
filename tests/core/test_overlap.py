"""Overlapped stepping: the next step is submitted before the running one is awaited. Outputs do not
change.
"""

from concurrent.futures import Future

import pytest
from quire.core.engine_core import EngineCore
from quire.ipc.messages import EngineCoreRequest, FinishReason
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from quire.tests.core.engine_loop import assert_nothing_left, collect, make_core, run, step
from quire.tests.fakes import FakeExecutor, digest_of, expected_output, make_config


class LateExecutor(FakeExecutor):
    """Runs a step when its result is read, so the scheduler cannot use the result earlier. Records
    the order of events.
    """

    def __init__(self, config):
        super().__init__(config)
        self.events: list[str] = []

    def submit_model(self, step: SchedulerOutput) -> Future:
        self.events.append(f"submit {step.step}")
        return LateResult(self, step)


class LateResult(Future):
    def __init__(self, executor: LateExecutor, step: SchedulerOutput):
        super().__init__()
        self.executor, self.step = executor, step

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self.executor.events.append(f"wait {self.step.step}")
        return self.executor.execute_model(self.step)


def make_late_core(num_state_checkpoints: int | None = None, **arguments) -> EngineCore:
    config = make_config(async_scheduling=True, **arguments)
    executor = LateExecutor(config)
    executor.num_state_checkpoints = num_state_checkpoints
    return EngineCore(config, executor, check_every_step=True)


def request(
    request_id: str = "r", num_prompt: int = 5, max_tokens: int = 4, **fields
) -> EngineCoreRequest:
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    return EngineCoreRequest(request_id, list(range(1, num_prompt + 1)), params, **fields)


def test_the_next_step_is_submitted_before_the_last_is_awaited():
    core = make_late_core()
    core.add_request(request(max_tokens=4))
    answers = run(core)[0]
    assert core.executor.events == [
        "submit 0",
        "submit 1",
        "wait 0",
        "submit 2",
        "wait 1",
        "submit 3",
        "wait 2",
        "wait 3",
    ]
    assert (
        answers["r"].tokens
        == expected_output([1, 2, 3, 4, 5], request(max_tokens=4).sampling_params, [], core.config)[
            0
        ]
    )
    assert_nothing_left(core)


DRAFTS = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.mark.parametrize("num_state_checkpoints", [None, 9])
def test_a_request_that_drafts_is_scheduled_before_its_drafts_are_verified(num_state_checkpoints):
    core = make_late_core(num_state_checkpoints, speculative_config=DRAFTS)
    core.add_request(request("a", num_prompt=70, max_tokens=100))
    first = run(core)[0]["a"].tokens
    events = core.executor.events
    num_steps = len(core.executor.steps)
    assert num_steps < 60  # some drafts are accepted
    # at the end, the room for tokens ends before the tokens do
    for n in range(num_steps - 8):
        assert events.index(f"wait {n}") > events.index(f"submit {n + 1}")
    for other in (make_late_core(), make_core(speculative_config=DRAFTS)):
        other.add_request(request("a", num_prompt=70, max_tokens=100))
        assert run(other)[0]["a"].tokens == first
    # a second turn finds the blocks of the first one's output, and a state at the end of one
    prompt = [*range(1, 71), *first, 7, 8, 9]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=3)
    core.add_request(EngineCoreRequest("b", prompt, params))
    answer = run(core)[0]["b"]
    assert answer.tokens == expected_output(prompt, params, [], core.config)[0]
    assert core.scheduler.counters.prefix_cache_hits >= 144
    assert core.scheduler.counters.num_states_restored == (num_state_checkpoints is not None)
    assert_nothing_left(core)


@pytest.mark.parametrize("num_state_checkpoints", [None, 40])
def test_what_counts_as_computed_is_computed(num_state_checkpoints):
    """After each step, of each request, and of each state that can be found."""
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 48, "block_size": 8}
    core = make_late_core(num_state_checkpoints, speculative_config=DRAFTS, **sizes)
    prompts = {f"r{i}": [(5 * i + j) % 97 for j in range(9 + 20 * i)] for i in range(5)}
    for name, prompt in prompts.items():
        params = SamplingParams(temperature=0.0, seed=0, max_tokens=70)
        core.add_request(EngineCoreRequest(name, prompt, params))
    manager, num_known = core.scheduler.kv_cache_manager, 0
    digests: dict[bytes, int] = {}  # by the name of a block
    while core.has_work():
        step(core)
        for one in core.scheduler.running:
            if one.num_executed_tokens:
                slot = core.executor.slots[one.slot]
                assert one.num_executed_tokens == slot.num_computed_tokens
            for number, name in enumerate(one.block_hashes, start=1):
                if name not in digests:
                    digests[name] = digest_of(one.token_ids[: 8 * number])
        if manager.checkpoints is None:
            continue
        for name, checkpoint in manager.checkpoints._named.items():
            if name in digests:  # else its request has ended with this step
                assert core.executor.states.places[checkpoint.place] == digests[name]
                num_known += 1
    assert (num_known > 99) == (num_state_checkpoints is not None)
    assert_nothing_left(core)


def test_a_stop_is_seen_one_step_late_and_its_extra_row_is_ignored():
    core = make_late_core()
    core.executor.tokens["r", 1] = 13
    core.add_request(request(max_tokens=10, eos_token_ids=[13]))
    answers = run(core)[0]
    assert answers["r"].reason is FinishReason.STOP and len(answers["r"].tokens) == 2
    assert len(core.executor.steps) == 3  # the third was already submitted
    assert_nothing_left(core)


def test_a_row_that_fails_fails_alone_and_its_next_row_is_ignored():
    core = make_late_core()
    core.executor.nan_rows.add(("bad", 2))
    core.add_request(request("bad", max_tokens=8))
    core.add_request(request("good", max_tokens=8))
    answers = run(core)[0]
    assert answers["bad"].reason is FinishReason.ERROR and len(answers["bad"].tokens) == 2
    assert (
        answers["good"].tokens
        == expected_output([1, 2, 3, 4, 5], request(max_tokens=8).sampling_params, [], core.config)[
            0
        ]
    )
    assert_nothing_left(core)


def test_an_abort_between_two_steps():
    core = make_late_core()
    core.add_request(request("a", max_tokens=50))
    core.add_request(request("b", max_tokens=6))
    answers: dict = {}
    for _ in range(3):
        for outputs in step(core).values():
            collect(outputs, answers)
    core.abort_requests(["a"])
    run(core, {0: answers})
    assert answers["a"].reason is FinishReason.ABORT and answers["b"].reason is FinishReason.LENGTH
    assert_nothing_left(core)


def test_a_slot_is_not_reused_while_its_last_row_runs():
    core = make_late_core(max_num_seqs=1)
    for i in range(4):
        core.executor.tokens[str(i), i] = 13
        core.add_request(request(str(i), num_prompt=3 + i, max_tokens=9, eos_token_ids=[13]))
    answers = run(core)[0]
    assert [len(answers[str(i)].tokens) for i in range(4)] == [1, 2, 3, 4]
    assert_nothing_left(core)


def test_calls_of_the_executor_wait_for_the_step_in_flight():
    core = make_late_core()
    core.add_request(request(max_tokens=20))
    step(core)
    assert core.executor.events == ["submit 0"]
    core.call_utility("execute_dummy_batch", [])
    assert core.executor.events == ["submit 0", "wait 0"] and core.executor.num_dummy_batches == 1
    assert len(run(core)[0]["r"].tokens) == 20


@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
def test_lookahead_is_trimmed_at_the_stop(num_scheduler_steps):
    core = make_core(async_scheduling=num_scheduler_steps == 4, num_scheduler_steps=4)
    core.executor.tokens["r", 5] = 13
    core.add_request(request(max_tokens=30, eos_token_ids=[13]))
    answers = run(core)[0]
    assert answers["r"].reason is FinishReason.STOP and len(answers["r"].tokens) == 6
    assert_nothing_left(core)


def test_lookahead_needs_proportionally_fewer_steps():
    core = make_core(num_scheduler_steps=5)
    core.add_request(request(max_tokens=13))
    answers = run(core)[0]
    assert len(answers["r"].tokens) == 13
    # the first token comes with the prompt
    assert [sum(s.num_lookahead_tokens) for s in core.executor.steps] == [0, 4, 4, 1]


def test_a_step_that_fails_ends_the_engine_in_either_form():
    for is_overlapped in (False, True):
        core = make_core(async_scheduling=is_overlapped)
        core.executor.raise_at_step = 1
        core.add_request(request())
        with pytest.raises(RuntimeError, match="scripted failure at step 1"):
            run(core)
        core.shutdown()
