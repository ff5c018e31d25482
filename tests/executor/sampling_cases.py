"""Steps of requests with every option, for the samplers: `check_step` compares FusedSampler with
Sampler.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from quire.executor.sampling.fused_sampler import FusedSampler
from quire.executor.sampling.sampler import Sampler, SamplerOutput
from quire.tests.executor.stage_cases import OPS, VOCAB_SIZE, StageRequest, make_batch, make_logits

GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.9, "seed": 3}
FILTERED = {**DRAWN, "top_k": 9, "top_p": 0.8, "min_p": 0.01}
PENALISED = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2}
EDITED = {"logit_bias": {4: 3.0, 9: -2.5}, "bad_words_token_ids": [[9], [5, 6]], "min_tokens": 9}
GRAMMAR = {"extra_args": {"grammar": True}}
SCORED = {"logprobs": 4}
ALL = {**FILTERED, **PENALISED, **EDITED, **GRAMMAR, **SCORED}
# name -> the parameters of each row
STEPS: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY] * 2,
    "temperature": [DRAWN, GREEDY],
    "filters": [FILTERED, DRAWN, GREEDY],
    "penalties": [PENALISED, GREEDY],
    "penalties and temperature": [{**PENALISED, **DRAWN}, DRAWN],
    "mask": [GRAMMAR, {"allowed_token_ids": [3, 8]}, {**GRAMMAR, "allowed_token_ids": [3, 8]}],
    "edits": [EDITED, GREEDY],
    "log-probabilities": [SCORED, GREEDY, {**DRAWN, "logprobs": 0}],
    "all": [ALL, FILTERED, {**GREEDY, **SCORED}, PENALISED, {**DRAWN, **SCORED, **PENALISED}],
}


class Grammar:
    """Stands in for the grammar: allows even tokens."""

    parameter = "structured_outputs"
    words = np.array([0x55555555], np.int32)

    def enter(self, request) -> bool:
        return bool(request.sampling_params.extra_args)

    def leave(self, slot: int) -> None:
        pass

    def apply(self, logits, rows, slots, batch) -> None:
        bitmask = torch.from_numpy(np.repeat(self.words[None], len(rows), 0))
        OPS.apply_grammar_bitmask(logits, bitmask, torch.from_numpy(rows))

    def describe(self, changes, rows, slots, batch) -> None:
        for row in rows.tolist():
            changes.allow_words(row, self.words)


def check_step(ops: Any, rows: list[dict[str, Any]], **others: Any) -> SamplerOutput:
    """FusedSampler with `ops` gives what Sampler gives on a CPU. Returns it."""
    requests = [StageRequest(row, output=[5, 6, 5], eos=[7]) for row in rows]
    logits, slots = make_logits(len(rows), seed=len(rows)), np.arange(len(rows))
    for row, values in others.get("logits", {}).items():
        logits[row] = values
    outputs = []
    for sampler in (Sampler(OPS), FusedSampler(ops)):
        batch = make_batch(*requests, first=[Grammar()], processors=others.get("processors", ()))
        outputs.append(sampler(logits.clone(), batch, slots))
    expected, given = outputs
    good = [row for row in range(len(rows)) if row not in expected.errors]
    assert given.token_ids[good].tolist() == expected.token_ids[good].tolist()
    assert given.errors == expected.errors
    for mine, theirs in zip(given.logprobs, expected.logprobs, strict=True):
        assert (mine.slot, mine.token_ids, mine.ranks) == (
            *(theirs.slot, theirs.token_ids, theirs.ranks),
        )
        assert mine.logprobs.shape == theirs.logprobs.shape
        values = (np.frombuffer(one.logprobs.data, np.float32) for one in (mine, theirs))
        np.testing.assert_allclose(*values, rtol=1e-5, atol=1e-5)
    return given


__all__ = ["ALL", "STEPS", "VOCAB_SIZE", "check_step"]
