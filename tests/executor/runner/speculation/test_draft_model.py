"""A draft model drafts what it would generate itself, wherever it stopped before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from quire import EngineArgs, SamplingParams
from quire.executor.worker import Worker
from quire.ipc.step_messages import NewRequestData, SchedulerOutput

PROMPTS = [[5, 9, 2, 7, 1, 8, 44, 3, 17], [11, 200, 30], [4] * 40]
PARAMS = [
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=0.9, seed=2, top_k=40),
    SamplingParams(temperature=1.3, seed=3),
]
REFERENCE = {"sample_tokens": "reference"}


def start(**arguments: Any) -> Worker:
    config = {"method": "draft_model", "model": "bundled", "adaptive": False}
    settings = {"max_num_seqs": 8, "max_model_len": 256, "speculative_config": config} | arguments
    args = EngineArgs("bundled", dtype="bfloat16", **settings)
    executor = Worker(args.create_engine_config())
    executor.load_model(lambda stage, fraction: None)
    executor.initialize_kv_cache(60)
    return executor


def enter(executor: Worker) -> Any:
    """Puts the prompts into slots 0, 1, 2, and computes them; returns the drafter and the batch."""
    requests = [
        NewRequestData(slot, str(slot), prompt, len(prompt), params)
        for slot, (prompt, params) in enumerate(zip(PROMPTS, PARAMS))
    ]
    lengths, blocks = [len(prompt) for prompt in PROMPTS], [[1, 2], [3, 4], [5, 6, 7, 8]]
    executor.execute_model(SchedulerOutput(0, [0, 1, 2], lengths, [0] * 3, blocks, requests))
    runner = executor.runner
    return runner.speculation.drafter, runner.batch


@pytest.mark.parametrize("arguments", [{}, {"kernels": REFERENCE}, {"num_threads": 2}])
def test_a_draft_is_what_the_model_draws(arguments):
    drafter, batch = enter(start(**arguments))
    drafter._max_num_tokens = 7  # less than what has to be computed
    known = batch.num_tokens[:3].copy()
    long = drafter.draft([0, 1, 2], [6, 3, 5], 60)
    assert [len(draft) for draft in long] == [6, 3, 5]
    assert (batch.num_tokens[:3] == known).all()  # the caller decides what is accepted
    # other counts, order and neighbours; nothing accepted in between
    again = drafter.draft([2, 0], [2, 4], 60)
    assert [draft.tolist() for draft in again] == [long[2][:2].tolist(), long[0][:4].tolist()]
    # some accepted, some refused, then all
    batch.append_runs(np.array([0]), long[0][None, :2])
    assert drafter.draft([0], [4], 60)[0].tolist() == long[0][2:].tolist()
    batch.append_tokens(np.array([0]), np.array([7]))
    other = drafter.draft([0], [5], 60)[0].tolist()
    drafter.enter(0, 0)  # computes the whole text again
    assert drafter.draft([0], [5], 60)[0].tolist() == other
    batch.append_runs(np.array([0]), np.array([other]))
    after = drafter.draft([0], [3], 60)[0].tolist()
    drafter.enter(0, 0)
    assert drafter.draft([0], [3], 60)[0].tolist() == after


def test_room_and_context_limit_drafts():
    drafter, batch = enter(start())
    drafter.max_model_len = 46
    assert [len(draft) for draft in drafter.draft([0, 1, 2], [4, 4, 4], 6)] == [4, 2, 0]
    assert batch.num_tokens[2] == 41
    assert [len(draft) for draft in drafter.draft([2], [9], 60)] == [5]
    assert [len(draft) for draft in drafter.draft([2, 1], [0, 0], 60)] == [0, 0]


def test_rows_that_are_not_finite_end_their_drafts():
    for arguments in ({}, {"kernels": REFERENCE}):
        executor = start(**arguments)
        drafter, batch = enter(executor)
        for layer in drafter.passes.model.attention_layers():
            layer.value_cache[3].fill_(float("nan"))
        drafter.enter(1, 3)  # it takes what the cache holds for computed
        drafts = drafter.draft([0, 1, 2], [3, 3, 3], 60)
        assert [len(draft) for draft in drafts] == [3, 0, 3]
        assert all(0 <= token < 2144 for draft in drafts for token in draft)
