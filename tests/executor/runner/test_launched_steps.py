"""Steps whose tokens stay on the device. A launch waits for nothing, and a late token is applied to
its request or dropped.
"""

from __future__ import annotations

import pytest
import torch
from quire.executor.input_batch import NOT_KNOWN
from quire.executor.runner.launched_steps import PendingStep
from quire.executor.sampling.sampler import NOT_FINITE
from quire.executor.worker import Worker
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.tests.executor.driver import Driver, generate, greedy, start_executor
from quire.tests.executor.on_device import (
    LateCopies,
    capture_decodes,
    keep_state_on_device,
    use_forward,
)

PROMPTS = [[5, 6, 7], [40], list(range(60, 100)), [9, 8, 7, 6, 5]]
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, top_k=60, min_p=0.01, seed=7)
NUM_BLOCKS = 6  # blocks of each slot: slot s has 1 + NUM_BLOCKS * s and those that follow


class Steps:
    """Submits steps like the core with overlap, without waiting for one before the next."""

    def __init__(self, executor: Worker):
        self.executor = executor
        self.pending: list = []

    def submit(
        self,
        rows: dict[int, tuple[int, int]],
        new: dict[int, tuple[list[int], SamplingParams]] | None = None,
        freed: tuple[int, ...] = (),
        lookahead: int = 0,
    ) -> PendingStep:
        """Submit a step. `rows` has, by slot, the computed tokens and the tokens to compute; `new`
        has, by slot, a request's tokens and parameters.
        """
        new = new or {}
        output = SchedulerOutput(
            len(self.pending),
            list(rows),
            [count for _, count in rows.values()],
            [computed for computed, _ in rows.values()],
            [
                list(range(1 + NUM_BLOCKS * slot, 1 + NUM_BLOCKS * (slot + 1)))
                if slot in new
                else []
                for slot in rows
            ],
            [
                NewRequestData(slot, f"r{slot}", tokens, len(tokens), params)
                for slot, (tokens, params) in new.items()
            ],
            list(freed),
            [lookahead] * len(rows) if lookahead else [],
        )
        self.pending.append(self.executor.submit_model(output))
        return self.pending[-1]

    def tokens(self) -> list[list[int]]:
        return [step.result().token_ids for step in self.pending]


@pytest.fixture
def copies() -> LateCopies:
    return LateCopies()


@pytest.fixture(scope="module", params=["qwen2", "qwen3_next"])  # the second keeps states
def kind(request) -> str:
    return request.param


@pytest.fixture(params=["eager", "graphs"])
def executor(tiny, kind, copies, request) -> Worker:
    executor = start_executor(tiny(kind), max_num_seqs=5)
    keep_state_on_device(executor, copies)
    copies.forget()
    if request.param == "graphs":
        capture_decodes(executor)
    return executor


@pytest.fixture(scope="module")
def plain(tiny, kind) -> Worker:
    return start_executor(tiny(kind), max_num_seqs=5)


def alone(plain: Worker, prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    return generate(plain, [prompt], count, params)[0].output


@pytest.mark.parametrize("params", [greedy(), DRAWN], ids=["greedy", "drawn"])
def test_six_steps_are_launched_before_the_first_is_awaited(executor, plain, copies, params):
    steps = Steps(executor)
    steps.submit(
        {slot: (0, len(prompt)) for slot, prompt in enumerate(PROMPTS)},
        {slot: (prompt, params) for slot, prompt in enumerate(PROMPTS)},
    )
    for step in range(5):
        steps.submit({slot: (len(prompt) + step, 1) for slot, prompt in enumerate(PROMPTS)})
    assert copies.events == [f"launched {n}" for n in range(6)]
    batch = executor.runner.batch
    assert all(
        (batch.token_ids[slot, len(prompt) : len(prompt) + 6] == NOT_KNOWN).all()
        for slot, prompt in enumerate(PROMPTS)
    )
    results = [list(tokens) for tokens in zip(*steps.tokens(), strict=True)]
    assert results == [alone(plain, prompt, params, 6) for prompt in PROMPTS]
    assert copies.events[6:] == [f"waits for {n}" for n in range(6)]
    assert [
        batch.token_ids[slot, len(prompt) : len(prompt) + 6].tolist()
        for slot, prompt in enumerate(PROMPTS)
    ] == results
    # a second call does not wait
    assert (
        steps.tokens() == [list(tokens) for tokens in zip(*results, strict=True)]
        and len(copies.events) == 12
    )


def test_lookahead_passes_of_a_step_wait_for_nothing(executor, plain, copies):
    steps = Steps(executor)
    steps.submit(
        {0: (0, 3), 3: (0, 5), 2: (0, 33)},
        {0: (PROMPTS[0], greedy()), 3: (PROMPTS[3], DRAWN), 2: (PROMPTS[2], greedy())},
        lookahead=3,
    )
    steps.submit({2: (33, 7), 3: (5 + 3, 1), 0: (3 + 3, 1)}, lookahead=2)
    assert copies.events == ["launched 0", "launched 1"]
    first, second = (step.result() for step in steps.pending)
    by_slot = {
        0: alone(plain, PROMPTS[0], greedy(), 7),
        3: alone(plain, PROMPTS[3], DRAWN, 7),
        2: alone(plain, PROMPTS[2], greedy(), 3),
    }
    assert (first.num_sampled, first.token_ids) == ([4, 4, 0], by_slot[0][:4] + by_slot[3][:4])
    assert (second.num_sampled, second.token_ids) == (
        [3, 3, 3],
        by_slot[2] + by_slot[3][4:] + by_slot[0][4:],
    )


def test_a_token_for_a_slot_that_has_another_request(executor, plain, copies):
    """The first request ends with step 1 and has an extra row in step 2. The second enters with
    step 3, before step 2 is finished.
    """
    steps, params = (
        Steps(executor),
        SamplingParams(temperature=0.0, seed=0, min_tokens=3, stop_token_ids=[311]),
    )
    steps.submit({0: (0, 3), 1: (0, 1)}, {0: (PROMPTS[0], greedy()), 1: (PROMPTS[1], greedy())})
    steps.submit({0: (3, 1), 1: (1, 1)})
    steps.submit({0: (4, 1), 1: (2, 1)})
    steps.submit({0: (0, 5), 1: (3, 1)}, {0: (PROMPTS[3], DRAWN)}, freed=(0,))
    steps.submit({0: (5, 1), 1: (4, 1)})
    assert copies.events == [f"launched {n}" for n in range(5)]
    assert steps.pending[2].result().num_sampled == [1, 1]
    batch = executor.runner.batch
    assert (
        batch.token_ids[0, :5].tolist() == PROMPTS[3]
        and (batch.token_ids[0, 5:7] == NOT_KNOWN).all()
        and batch.num_tokens[0] == 7
    )
    steps.submit({0: (6, 1), 1: (5, 1)})
    # needs the host: all steps are finished first
    steps.submit({0: (7, 1), 4: (0, 3)}, {4: (PROMPTS[0], params)})
    results = steps.tokens()
    assert [tokens[0] for tokens in results[3:]] == alone(plain, PROMPTS[3], DRAWN, 4)
    assert [tokens[1] for tokens in results[:6]] == alone(plain, PROMPTS[1], greedy(), 6)
    assert results[6][1] == alone(plain, PROMPTS[0], params, 1)[0]


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    "options",
    [
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"repetition_penalty": 1.3},
        {"logit_bias": {3: 5.0}},
        {"min_tokens": 9, "stop_token_ids": [5]},
    ],
    ids=str,
)
def test_a_row_that_needs_the_host_makes_the_step_synchronous(executor, plain, copies, options):
    """Launched steps are finished before. The step itself is finished before the next one if its
    result has not been read; its tokens reach the device with the next step.
    """
    steps, params = Steps(executor), SamplingParams(temperature=0.0, seed=0, **options)
    steps.submit({0: (0, 3)}, {0: (PROMPTS[0], greedy())})
    steps.submit({0: (3, 1)})
    steps.submit({0: (4, 1), 2: (0, 5)}, {2: (PROMPTS[3], params)}, lookahead=2)
    assert copies.events == ["launched 0", "launched 1", "waits for 0", "waits for 1"]
    # the model has run, but nothing is sampled
    assert executor.runner.batch.num_tokens[[0, 2]].tolist() == [5, 5]
    steps.submit({0: (5 + 2, 1)})
    assert executor.runner.batch.num_tokens[[0, 2]].tolist() == [9, 8]
    expected = alone(plain, PROMPTS[0], greedy(), 7), alone(plain, PROMPTS[3], params, 6)
    if "prompt_logprobs" not in options:  # the prompt is complete
        steps.submit({0: (8, 1), 2: (5 + 2, 1)}, lookahead=0)
        assert copies.events[4:] == ["launched 2", "waits for 2"]
    results = steps.tokens()
    assert results[:4] == [
        expected[0][:1],
        expected[0][1:2],
        expected[0][2:5] + expected[1][:3],
        expected[0][5:6],
    ]
    assert results[4:] in ([], [[expected[0][6], expected[1][3]]])
    assert bool(steps.pending[2].result().prompt_logprobs) == ("prompt_logprobs" in options)


def poison(executor: Worker, monkeypatch, passes: set[int], row: int) -> None:
    """Set the logits of `row` to NaN in these passes of the model, counted from now."""
    logits, count = executor.model.compute_logits, iter(range(99))

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        values = logits(hidden)
        return (
            values.index_fill(0, torch.tensor([row]), float("nan"))
            if next(count) in passes
            else values
        )

    monkeypatch.setattr(executor.model, "compute_logits", poisoned)
    # a recorded step would not call it
    use_forward(executor, None)


@pytest.mark.parametrize("params", [greedy(), DRAWN], ids=["greedy", "drawn"])
def test_non_finite_logits_are_found_when_the_step_is_finished(
    executor, plain, monkeypatch, params
):
    """Only that row fails. Later steps have a placeholder token, and their results are dropped."""
    poison(executor, monkeypatch, {1, 2}, row=1)
    steps = Steps(executor)
    steps.submit({0: (0, 3), 3: (0, 5)}, {0: (PROMPTS[0], params), 3: (PROMPTS[3], params)})
    for step in range(3):
        steps.submit({0: (3 + step, 1), 3: (5 + step, 1)})
    assert executor.state.tables.token_ids[3, 6:8].tolist() == [0, 0]
    results = [step.result() for step in steps.pending]
    assert [one.errors for one in results] == [{}, {3: NOT_FINITE}, {3: NOT_FINITE}, {}]
    assert [one.num_sampled for one in results] == [[1, 1], [1, 0], [1, 0], [1, 1]]
    assert [one.token_ids[0] for one in results] == alone(plain, PROMPTS[0], params, 4)


def test_a_row_that_fails_in_the_lookahead_keeps_its_earlier_tokens(executor, plain, monkeypatch):
    poison(executor, monkeypatch, {2}, row=1)
    steps = Steps(executor)
    steps.submit(
        {0: (0, 3), 3: (0, 5)}, {0: (PROMPTS[0], greedy()), 3: (PROMPTS[3], greedy())}, lookahead=4
    )
    results = steps.pending[0].result()
    expected = alone(plain, PROMPTS[0], greedy(), 5), alone(plain, PROMPTS[3], greedy(), 2)
    assert results == ModelRunnerOutput([5, 2], expected[0] + expected[1], errors={3: NOT_FINITE})


def test_a_request_that_cannot_be_served_gets_an_error_and_no_token(executor, plain):
    steps = Steps(executor)
    steps.submit(
        {1: (0, 1), 0: (0, 3)},
        {1: (PROMPTS[1], SamplingParams(seed=None)), 0: (PROMPTS[0], greedy())},
        lookahead=1,
    )
    results = steps.pending[0].result()
    assert (
        results.num_sampled == [0, 2]
        and list(results.errors) == [1]
        and results.errors[1].startswith("seed")
    )
    assert results.token_ids == alone(plain, PROMPTS[0], greedy(), 2)


def test_a_request_that_returns_in_another_slot_continues(executor, plain):
    """As after a preemption: the request has its tokens so far, and the host knows all of them."""
    driver = Driver(executor)
    for name, prompt in zip("abc", PROMPTS):
        driver.add(name, prompt, DRAWN)
    driver.run(4)
    driver.preempt(driver.rows["b"])
    driver.run(9)
    assert [driver.rows[name].output for name in "abc"] == [
        alone(plain, prompt, DRAWN, 9) for prompt in PROMPTS[:3]
    ]


def test_a_step_of_unfinished_prompts_is_awaited(executor, copies):
    """Otherwise the host would run ahead of the device by the length of the prompts."""
    steps = Steps(executor)
    steps.submit({2: (0, 33)}, {2: (PROMPTS[2], greedy())})
    assert steps.pending[0].result() == ModelRunnerOutput([0], [])
    assert copies.events == ["launched 0", "waits for 0"]


def test_a_failed_launch_is_raised_in_order(executor, plain, monkeypatch):
    steps = Steps(executor)
    steps.submit({0: (0, 3)}, {0: (PROMPTS[0], greedy())})
    monkeypatch.setattr(executor.runner.launched.launcher, "launch", lambda output: 1 / 0)
    failed = steps.submit({0: (3, 1)})
    assert steps.pending[0].result().token_ids == alone(plain, PROMPTS[0], greedy(), 1)
    with pytest.raises(ZeroDivisionError):
        failed.result()
