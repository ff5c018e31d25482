"""The order of the stages, which rows each is called for, and rows without a possible token."""

from __future__ import annotations

import numpy as np
import torch
from quire.executor.sampling.logits_processors import LoadedProcessor
from quire.executor.sampling.sampler import Sampler
from quire.ipc.step_messages import RowRefusal
from quire.tests.executor.stage_cases import (
    MASKED,
    OPS,
    VOCAB_SIZE,
    StageRequest,
    append,
    make_batch,
    make_logits,
    masked_tokens,
    run_stages,
)


class MaskRow:
    """Stands in for the grammar. Allows only `token_ids` for every request that enables it, and
    records its calls.
    """

    def __init__(self, token_ids: list[int]):
        self.token_ids = token_ids
        self.calls: list[tuple[list[int], list[int]]] = []

    def enter(self, request) -> bool:
        return bool(request.sampling_params.extra_args)

    def leave(self, slot: int) -> None:
        pass

    def apply(self, logits, rows, slots, batch):
        self.calls.append((rows.tolist(), slots.tolist()))
        for row in rows.tolist():
            kept = logits[row, self.token_ids].clone()
            logits[row] = MASKED
            logits[row, self.token_ids] = kept


class Recorder:
    """A user's processor that records the row it gets and adds one to every logit."""

    def __init__(self):
        self.seen: list[np.ndarray] = []

    def __call__(self, prompt_token_ids, output_token_ids, logits):
        self.seen.append(logits.numpy().copy())
        return logits + 1


MASKED_TOGETHER = RowRefusal(
    "allowed_token_ids", "no token is left: allowed_token_ids, min_tokens mask every token"
)


def test_the_order():
    """Apply all stages to one row. Each stage gets the output of those before it, so any two
    swapped neighbours would change the result.
    """
    recorder, grammar = Recorder(), MaskRow(list(range(12)))
    params = {
        "extra_args": {"grammar": True},
        "allowed_token_ids": list(range(2, 20)),
        "bad_words_token_ids": [[3]],
        "min_tokens": 9,
        "logit_bias": {0: 500.0, 3: 500.0, 4: 500.0, 5: 1.5, 6: -10.0},
        "repetition_penalty": 2.0,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.25,
        "logprobs": 3,
    }
    request = StageRequest(params, prompt=[5, 7], output=[5, 6, 6], eos=[4])
    batch = make_batch(
        request,
        processors=[LoadedProcessor("tests:recorder", lambda params: recorder)],
        first=[grammar],
    )
    logits = make_logits(1)
    logits[0, 5:7] = torch.tensor([1.0, 4.0])
    raw = logits[0].double().numpy()
    rows, errors = run_stages(batch, logits)
    assert not errors

    biased = raw.copy()
    biased[[5, 6]] += (1.5, -10.0)
    # 0 by allowed ids, 3 by bad words, 4 by min_tokens: a bias of 500 does not unmask them
    masked = {0, 1, 3, 4, *range(12, VOCAB_SIZE)}
    biased[list(masked)] = MASKED
    (seen,) = recorder.seen
    np.testing.assert_allclose(seen, biased, rtol=1e-5)
    final = biased + 1  # token 5 was 3.5, so it is divided; token 6 was -5, so it is multiplied
    final[5], final[6], final[7] = (
        3.5 / 2 - 0.5 - 0.25,
        -5.0 * 2 - 2 * 0.5 - 0.25,
        (final[7] / 2 if final[7] > 0 else final[7] * 2),
    )
    np.testing.assert_allclose(rows[0], final, rtol=1e-5)

    output = Sampler(OPS)(logits.clone(), batch, np.array([0]))
    assert output.token_ids.tolist() == [int(final.argmax())]
    expected = raw - np.log(np.exp(raw).sum())
    values = np.frombuffer(output.logprobs[0].logprobs.data, np.float32)
    np.testing.assert_allclose(
        values, expected[[int(final.argmax()), *np.argsort(-raw)[:3]]], rtol=1e-5
    )


def test_the_grammar_comes_before_all_others():
    """Later stages do not widen its mask. Allowed ids narrow it further, and a row that both empty
    is an error.
    """
    both = make_batch(
        StageRequest({"extra_args": {"g": 1}, "allowed_token_ids": [3, 9]}), first=[MaskRow([3, 4])]
    )
    assert masked_tokens(run_stages(both, make_logits(1))[0][0]) == set(range(VOCAB_SIZE)) - {3}


def test_stages_are_called_only_for_their_own_rows():
    grammar = MaskRow([1])
    batch = make_batch(
        StageRequest(),
        StageRequest({"extra_args": {"g": 1}}),
        StageRequest(),
        StageRequest({"extra_args": {"g": 1}}),
        first=[grammar],
    )
    logits = make_logits(3)
    rows, _ = run_stages(batch, logits, [3, 0, 1])
    assert grammar.calls == [([0, 2], [3, 1])]
    np.testing.assert_array_equal(rows[1], logits[1])


def test_unused_stages_are_not_called():
    """A step whose requests use no stage skips the list, even if requests in other slots
    use one.
    """
    grammar = MaskRow([1])
    batch = make_batch(StageRequest(), StageRequest({"extra_args": {"g": 1}}), first=[grammar])
    run_stages(batch, make_logits(1), [0])
    assert grammar.calls == [] and batch.stages.num_slots == 1
    batch.remove(1)
    assert batch.stages.num_slots == 0
    batch.stages.stages = None  # would fail on access
    run_stages(batch, make_logits(1), [0])


def test_a_row_without_a_possible_token_fails_the_request():
    empty = {"allowed_token_ids": [4], "bad_words_token_ids": [[4]]}
    batch = make_batch(
        StageRequest(),
        StageRequest(empty),
        StageRequest({"min_tokens": 1, "allowed_token_ids": [5]}, eos=[5]),
        StageRequest({"repetition_penalty": 1e-6}),
    )
    logits = make_logits(4)
    logits[3] = 1e35
    rows, errors = run_stages(batch, logits)
    assert errors == {
        1: RowRefusal(
            "allowed_token_ids", "no token is left: allowed_token_ids, bad_words mask every token"
        ),
        2: MASKED_TOGETHER,
        3: RowRefusal("repetition_penalty", "makes the request's logits NaN or infinite"),
    }
    np.testing.assert_array_equal(rows[0], logits[0])
    for temperature in (0.0, 1.0):
        batch.temperature[:4] = temperature
        sampled = Sampler(OPS)(logits.clone(), batch, np.arange(4))
        assert sampled.errors == errors
        alone = Sampler(OPS)(
            logits[:1].clone(), make_batch(StageRequest({"temperature": temperature})), np.arange(1)
        )
        assert sampled.token_ids[0] == alone.token_ids[0]


def test_a_fully_masked_request_recovers_when_its_stage_allows_tokens():
    batch = make_batch(StageRequest({"min_tokens": 1, "allowed_token_ids": [5]}, eos=[5]))
    assert run_stages(batch, make_logits(1))[1] == {0: MASKED_TOGETHER}
    append(batch, 0, 5)
    rows, errors = run_stages(batch, make_logits(1))
    assert not errors and masked_tokens(rows[0]) == set(range(VOCAB_SIZE)) - {5}
