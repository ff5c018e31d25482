"""FusedSampler gives Sampler's tokens, log-probabilities and errors."""

from __future__ import annotations

import pytest
import torch
from quire.executor.sampling import fused_sampler
from quire.executor.sampling.logits_processors import LoadedProcessor
from quire.tests.executor.sampling_cases import ALL, STEPS, VOCAB_SIZE, check_step
from quire.tests.executor.stage_cases import OPS


class Counted:
    """The operations, with the names of those that are called."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, op: str):
        self.called.append(op)
        return getattr(OPS, op)


@pytest.mark.parametrize("name", STEPS)
def test_every_step_is_that_of_the_stages(name):
    ops = Counted()
    check_step(ops, STEPS[name])
    assert set(ops.called) <= {"argmax", "change_logits", "sample_tokens", "choose_tokens"}
    assert len(ops.called) <= 3


def test_rows_with_errors_fail_alone():
    """Masks that leave no token, a penalty that overflows, and logits that are not finite."""
    rows = [
        ALL,
        {"allowed_token_ids": [3], "bad_words_token_ids": [[3]]},
        {"repetition_penalty": 1e-6},
        ALL,
    ]
    values = {2: torch.full((VOCAB_SIZE,), 1e38), 3: torch.full((VOCAB_SIZE,), torch.nan)}
    assert set(check_step(OPS, rows, logits=values).errors) == {1, 2, 3}


def test_processors_and_many_log_probabilities_take_the_stages(monkeypatch):
    processor = LoadedProcessor("tests:double", lambda params: lambda prompt, output, row: row * 2)
    ops = Counted()
    check_step(ops, [ALL], processors=[processor])
    assert "gather_logprobs" in ops.called and "choose_tokens" not in ops.called
    ops = Counted()
    check_step(ops, [{"logprobs": -1}, ALL])
    assert "choose_tokens" in ops.called
    ops = Counted()
    monkeypatch.setattr(fused_sampler, "MOST_LOGPROBS", 3)
    check_step(ops, [{"logprobs": -1}, ALL])
    assert "gather_logprobs" in ops.called and "choose_tokens" not in ops.called
