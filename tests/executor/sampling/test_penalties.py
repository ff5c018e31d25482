"""Penalties compared with a direct implementation of their definition, over random lives of
requests in slots.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from quire.executor.sampling.penalties import NO_TOKEN, TokenCounts
from quire.tests.executor.stage_cases import (
    VOCAB_SIZE,
    StageRequest,
    append,
    make_batch,
    make_logits,
    run_stages,
)


def penalized(logits: np.ndarray, prompt: list[int], output: list[int], params: dict) -> np.ndarray:
    """The definition: repetition over prompt and output, frequency and presence over the output
    only.
    """
    row, counts = logits.astype(np.float64), Counter(output)
    for token_id in {*prompt, *output}:
        repetition = params.get("repetition_penalty", 1.0)
        row[token_id] = (
            row[token_id] / repetition if row[token_id] > 0 else row[token_id] * repetition
        )
    for token_id, count in counts.items():
        row[token_id] -= params.get("frequency_penalty", 0.0) * count + params.get(
            "presence_penalty", 0.0
        )
    return row


def random_request(rng: random.Random) -> StageRequest:
    params = {
        "repetition_penalty": rng.choice([1.0, 1.0, 0.5, 1.3, 3.0]),
        "frequency_penalty": rng.choice([0.0, 0.0, -2.0, 0.7]),
        "presence_penalty": rng.choice([0.0, 0.0, 2.0, -0.4]),
    }
    if rng.random() < 0.2:
        params = {}
    prompt, output = (rng.choices(range(VOCAB_SIZE), k=rng.randint(least, 12)) for least in (1, 0))
    return StageRequest(params, prompt, output)


@pytest.mark.parametrize("seed", range(25))
def test_random_lives(seed):
    """Requests enter with and without output, grow by one or several tokens, are used or not, and
    leave. Others take their slots.
    """
    rng = random.Random(seed)
    batch, held = make_batch(max_model_len=128), {}
    for step in range(40):
        for slot in range(4):
            if slot in held and rng.random() < 0.1:
                batch.remove(slot)
                del held[slot]
            if slot not in held:
                request = random_request(rng)
                batch.add(request.entering(slot))
                held[slot] = request, list(request.output)
            elif rng.random() < 0.8:
                new = rng.choices(range(VOCAB_SIZE), k=rng.choice([1, 1, 1, 2, 5]))
                room = 128 - int(batch.num_tokens[slot])
                append(batch, slot, *new[:room])
                held[slot][1].extend(new[:room])
        slots = rng.sample(range(4), k=rng.randint(1, 4))
        logits = make_logits(len(slots), seed=1000 * seed + step)
        rows, errors = run_stages(batch, logits, slots)
        assert not errors
        for row, slot in enumerate(slots):
            request, output = held[slot]
            expected = penalized(logits[row].numpy(), list(request.prompt), output, request.params)
            np.testing.assert_allclose(rows[row], expected, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_other_rows():
    rng = random.Random(3)
    requests, logits = [random_request(rng) for _ in range(8)], make_logits(8)
    together, _ = run_stages(make_batch(*requests), logits)
    for i, request in enumerate(requests):
        alone, _ = run_stages(make_batch(request), logits[i : i + 1])
        np.testing.assert_array_equal(alone[0], together[i])


def test_a_request_that_returns_equals_one_that_stayed():
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    output, logits = [4, 4, 7, 1, 4, 9], make_logits(1)
    stayed = make_batch(StageRequest(params))
    for token_id in output:
        run_stages(stayed, logits)
        append(stayed, 0, token_id)
    came_again = make_batch(StageRequest(params, output=output))
    np.testing.assert_array_equal(run_stages(stayed, logits)[0], run_stages(came_again, logits)[0])


def test_a_sequence_of_all_different_tokens_fills_its_table():
    batch = make_batch(
        StageRequest({"repetition_penalty": 2.0}, prompt=[0]), max_model_len=VOCAB_SIZE
    )
    logits = make_logits(1)
    for token_id in range(1, VOCAB_SIZE):
        run_stages(batch, logits)
        append(batch, 0, token_id)
    expected = penalized(
        logits[0].numpy(), [0], list(range(1, VOCAB_SIZE)), {"repetition_penalty": 2.0}
    )
    np.testing.assert_allclose(run_stages(batch, logits)[0][0], expected, rtol=1e-5)


def test_counts_hold_each_token_once():
    batch, counts = make_batch(StageRequest(prompt=[5, 5, 6], output=[6, 7, 7])), TokenCounts(4, 64)
    counts.reset(0, has_prompt=True)
    for new in ([], [7], [8], [8, 5]):
        append(batch, 0, *new)
        counts.catch_up(np.array([0]), batch)
    index, token_ids, numbers = counts.of(np.array([0]))
    assert dict(zip(token_ids.tolist(), numbers.tolist(), strict=True)) == {5: 1, 6: 1, 7: 3, 8: 2}
    assert index.tolist() == [0] * 4 and (counts.ids[0, 4:] == NO_TOKEN).all()


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_the_strongest_penalties_give_finite_numbers(penalty):
    logits = make_logits(2)
    rows, errors = run_stages(
        make_batch(
            *[StageRequest({"repetition_penalty": penalty, "frequency_penalty": -2.0}, output=[7])]
            * 2
        ),
        logits,
    )
    assert not errors and np.isfinite(rows).all()
