"""Tokens of steps that the last stage samples; test_steps_in_flight.py has whole engines."""

from __future__ import annotations

import pytest
from quire.executor.runner.stage_step import PendingTokens
from quire.tests.executor.driver import start_executor


def test_tokens_of_a_slot_that_has_another_request_are_dropped(tiny) -> None:
    runner = start_executor(tiny("qwen2")).runner
    batch, pending = runner.batch, PendingTokens(runner.batch)
    batch.num_tokens[:3] = 4
    batch.entries[:3] = 1, 2, 3
    pending.expect([0, 2, 1])
    pending.expect([0])
    batch.entries[2] = 9
    pending.append([2, 1, 0], [11, 12, 13])
    pending.append([1], [14])
    assert batch.num_tokens[:3].tolist() == [7, 4, 4]
    assert batch.token_ids[0, 4:7].tolist() == [11, 12, 14]
    pending.expect([0])
    with pytest.raises(ValueError, match="num_sampled: must be of 1 rows"):
        pending.append([1, 1], [1, 2])
