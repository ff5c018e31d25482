"""Steps whose tokens stay on the device: nothing is waited for before a launch, and what comes late
finds its place, or none.
"""

from __future__ import annotations

import pytest
import torch
from quire.executor.runner.input_batch import NOT_KNOWN
from quire.executor.runner.launched_steps import PendingStep
from quire.executor.sampling.sampler import NOT_FINITE
from quire.executor.single_process import SingleProcessExecutor
from quire.ipc.messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from quire.ipc.params import SamplingParams
from quire.tests.executor.driver import Driver, generate, greedy, start_executor
from quire.tests.executor.on_device import LateCopies, give_graphs

PROMPTS = [[5, 6, 7], [40], list(range(60, 100)), [9, 8, 7, 6, 5]]
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, top_k=60, min_p=0.01, seed=7)
NUM_BLOCKS = 6  # of each slot: slot s has 1 + NUM_BLOCKS * s and those behind


class Steps:
    """Submits steps as the core does when it overlaps, without waiting for one before the next."""

    def __init__(self, executor: SingleProcessExecutor):
        self.executor = executor
        self.pending: list = []

    def submit(
        self,
        rows: dict[int, tuple[int, int]],
        new: dict[int, tuple[list[int], SamplingParams]] | None = None,
        freed: tuple[int, ...] = (),
        lookahead: int = 0,
    ) -> PendingStep:
        """rows: by slot, tokens that are computed and those to compute. new: by slot, a request's
        tokens and parameters.
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


@pytest.fixture(params=["eager", "graphs"])
def executor(tiny, copies, request) -> SingleProcessExecutor:
    executor = start_executor(tiny("qwen2"), max_num_seqs=5)
    executor.worker.runner.keep_state_on_device(copies)
    copies.forget()
    if request.param == "graphs":
        give_graphs(executor.worker)
    return executor


@pytest.fixture(scope="module")
def plain(tiny) -> SingleProcessExecutor:
    return start_executor(tiny("qwen2"), max_num_seqs=5)


def alone(
    plain: SingleProcessExecutor, prompt: list[int], params: SamplingParams, count: int
) -> list[int]:
    return generate(plain, [prompt], count, params)[0].output


@pytest.mark.parametrize("params", [greedy(), DRAWN], ids=["greedy", "drawn"])
def test_six_steps_are_launched_before_the_first_is_waited_for(executor, plain, copies, params):
    steps = Steps(executor)
    steps.submit(
        {slot: (0, len(prompt)) for slot, prompt in enumerate(PROMPTS)},
        {slot: (prompt, params) for slot, prompt in enumerate(PROMPTS)},
    )
    for step in range(5):
        steps.submit({slot: (len(prompt) + step, 1) for slot, prompt in enumerate(PROMPTS)})
    assert copies.events == [f"launched {n}" for n in range(6)]
    batch = executor.worker.runner.batch
    assert all(
        (batch.token_ids[slot, len(prompt) : len(prompt) + 6] == NOT_KNOWN).all()
        for slot, prompt in enumerate(PROMPTS)
    )
    told = [list(tokens) for tokens in zip(*steps.tokens(), strict=True)]
    assert told == [alone(plain, prompt, params, 6) for prompt in PROMPTS]
    assert copies.events[6:] == [f"waits for {n}" for n in range(6)]
    assert [
        batch.token_ids[slot, len(prompt) : len(prompt) + 6].tolist()
        for slot, prompt in enumerate(PROMPTS)
    ] == told
    # asked again: nothing waits
    assert (
        steps.tokens() == [list(tokens) for tokens in zip(*told, strict=True)]
        and len(copies.events) == 12
    )


def test_passes_of_a_step_that_looks_ahead_wait_for_nothing(executor, plain, copies):
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


def test_a_slot_that_has_another_request_by_the_time_its_old_ones_token_comes(
    executor, plain, copies
):
    """The first one ended with step 1 and has a row too many in step 2; the second enters with step
    3, before step 2 is finished.
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
    batch = executor.worker.runner.batch
    assert (
        batch.token_ids[0, :5].tolist() == PROMPTS[3]
        and (batch.token_ids[0, 5:7] == NOT_KNOWN).all()
        and batch.num_tokens[0] == 7
    )
    steps.submit({0: (6, 1), 1: (5, 1)})
    # wants the host: all is finished first
    steps.submit({0: (7, 1), 4: (0, 3)}, {4: (PROMPTS[0], params)})
    told = steps.tokens()
    assert [tokens[0] for tokens in told[3:]] == alone(plain, PROMPTS[3], DRAWN, 4)
    assert [tokens[1] for tokens in told[:6]] == alone(plain, PROMPTS[1], greedy(), 6)
    assert told[6][1] == alone(plain, PROMPTS[0], params, 1)[0]


@pytest.mark.parametrize(
    "wish",
    [
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"repetition_penalty": 1.3},
        {"logit_bias": {3: 5.0}},
        {"min_tokens": 9, "stop_token_ids": [5]},
    ],
    ids=str,
)
def test_a_row_that_needs_the_host_makes_a_plain_step(executor, plain, copies, wish):
    """What was launched is finished before, and the step itself, if nobody has asked for it, before
    the next one; its tokens reach the device with that.
    """
    steps, params = Steps(executor), SamplingParams(temperature=0.0, seed=0, **wish)
    steps.submit({0: (0, 3)}, {0: (PROMPTS[0], greedy())})
    steps.submit({0: (3, 1)})
    steps.submit({0: (4, 1), 2: (0, 5)}, {2: (PROMPTS[3], params)}, lookahead=2)
    assert copies.events == ["launched 0", "launched 1", "waits for 0", "waits for 1"]
    # the model runs, nobody has sampled
    assert executor.worker.runner.batch.num_tokens[[0, 2]].tolist() == [5, 5]
    steps.submit({0: (5 + 2, 1)})
    assert executor.worker.runner.batch.num_tokens[[0, 2]].tolist() == [9, 8]
    expected = alone(plain, PROMPTS[0], greedy(), 7), alone(plain, PROMPTS[3], params, 6)
    if "prompt_logprobs" not in wish:  # it is over with the prompt
        steps.submit({0: (8, 1), 2: (5 + 2, 1)}, lookahead=0)
        assert copies.events[4:] == ["launched 2", "waits for 2"]
    told = steps.tokens()
    assert told[:4] == [
        expected[0][:1],
        expected[0][1:2],
        expected[0][2:5] + expected[1][:3],
        expected[0][5:6],
    ]
    assert told[4:] in ([], [[expected[0][6], expected[1][3]]])
    assert bool(steps.pending[2].result().prompt_logprobs) == ("prompt_logprobs" in wish)


def poison(executor: SingleProcessExecutor, monkeypatch, passes: set[int], row: int) -> None:
    """In these passes of the model, counted from now, the logits of `row` are not numbers."""
    logits, count = executor.worker.model.compute_logits, iter(range(99))

    def poisoned(hidden: torch.Tensor) -> torch.Tensor:
        values = logits(hidden)
        return (
            values.index_fill(0, torch.tensor([row]), float("nan"))
            if next(count) in passes
            else values
        )

    monkeypatch.setattr(executor.worker.model, "compute_logits", poisoned)
    # a recorded step would not hear of it
    monkeypatch.setattr(executor.worker.runner, "program", None)


@pytest.mark.parametrize("params", [greedy(), DRAWN], ids=["greedy", "drawn"])
def test_logits_that_are_not_finite_are_found_when_the_step_is_finished(
    executor, plain, monkeypatch, params
):
    """Of that row alone; the steps behind it have a token to compute with, and are computed in
    vain.
    """
    poison(executor, monkeypatch, {1, 2}, row=1)
    steps = Steps(executor)
    steps.submit({0: (0, 3), 3: (0, 5)}, {0: (PROMPTS[0], params), 3: (PROMPTS[3], params)})
    for step in range(3):
        steps.submit({0: (3 + step, 1), 3: (5 + step, 1)})
    assert executor.worker.runner.tables.token_ids[3, 6:8].tolist() == [0, 0]
    told = [step.result() for step in steps.pending]
    assert [one.errors for one in told] == [{}, {3: NOT_FINITE}, {3: NOT_FINITE}, {}]
    assert [one.num_sampled for one in told] == [[1, 1], [1, 0], [1, 0], [1, 1]]
    assert [one.token_ids[0] for one in told] == alone(plain, PROMPTS[0], params, 4)


def test_a_row_that_fails_while_it_looks_ahead_keeps_what_came_before(executor, plain, monkeypatch):
    poison(executor, monkeypatch, {2}, row=1)
    steps = Steps(executor)
    steps.submit(
        {0: (0, 3), 3: (0, 5)}, {0: (PROMPTS[0], greedy()), 3: (PROMPTS[3], greedy())}, lookahead=4
    )
    told = steps.pending[0].result()
    expected = alone(plain, PROMPTS[0], greedy(), 5), alone(plain, PROMPTS[3], greedy(), 2)
    assert told == ModelRunnerOutput([5, 2], expected[0] + expected[1], errors={3: NOT_FINITE})


def test_a_request_that_cannot_be_served_has_its_error_and_no_token(executor, plain):
    steps = Steps(executor)
    steps.submit(
        {1: (0, 1), 0: (0, 3)},
        {1: (PROMPTS[1], SamplingParams(seed=None)), 0: (PROMPTS[0], greedy())},
        lookahead=1,
    )
    told = steps.pending[0].result()
    assert (
        told.num_sampled == [0, 2]
        and list(told.errors) == [1]
        and told.errors[1].startswith("seed")
    )
    assert told.token_ids == alone(plain, PROMPTS[0], greedy(), 2)


def test_a_request_that_enters_again_in_another_slot_goes_on(executor, plain):
    """As after a preemption: with its tokens so far, all known to the host by then."""
    driver = Driver(executor)
    for name, prompt in zip("abc", PROMPTS):
        driver.add(name, prompt, DRAWN)
    driver.run(4)
    driver.preempt(driver.rows["b"])
    driver.run(9)
    assert [driver.rows[name].output for name in "abc"] == [
        alone(plain, prompt, DRAWN, 9) for prompt in PROMPTS[:3]
    ]


def test_a_step_of_unfinished_prompts_brings_nothing_and_is_waited_for_all_the_same(
    executor, copies
):
    """Else the host would run ahead of the device as far as prompts are long."""
    steps = Steps(executor)
    steps.submit({2: (0, 33)}, {2: (PROMPTS[2], greedy())})
    assert steps.pending[0].result() == ModelRunnerOutput([0], [])
    assert copies.events == ["launched 0", "waits for 0"]


def test_a_launch_that_fails_is_told_in_its_turn(executor, plain, monkeypatch):
    steps = Steps(executor)
    steps.submit({0: (0, 3)}, {0: (PROMPTS[0], greedy())})
    monkeypatch.setattr(executor.worker.runner.launcher, "launch", lambda output: 1 / 0)
    failed = steps.submit({0: (3, 1)})
    assert steps.pending[0].result().token_ids == alone(plain, PROMPTS[0], greedy(), 1)
    with pytest.raises(ZeroDivisionError):
        failed.result()
