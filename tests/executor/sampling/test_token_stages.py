"""Each single-token stage alone: which logits change, when, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from quire.ipc.step_messages import RowRefusal
from quire.tests.executor.stage_cases import (
    VOCAB_SIZE,
    StageRequest,
    append,
    make_batch,
    make_logits,
    masked_tokens,
    run_stages,
)

EVERYTHING = set(range(VOCAB_SIZE))


def test_only_allowed_tokens_remain_and_their_logits_are_unchanged():
    logits = make_logits(3)
    batch = make_batch(
        StageRequest({"allowed_token_ids": [4, 9, 4]}),
        StageRequest(),
        StageRequest({"allowed_token_ids": [0]}),
    )
    rows, errors = run_stages(batch, logits)
    assert not errors
    assert [masked_tokens(row) for row in rows] == [EVERYTHING - {4, 9}, set(), EVERYTHING - {0}]
    for row, kept in ((0, [4, 9]), (2, [0])):
        np.testing.assert_array_equal(rows[row, kept], logits[row, kept])
    np.testing.assert_array_equal(rows[1], logits[1])


BAD_WORDS = [[5], [6, 7], [8, 9, 10], [11, 9, 12], [6, 6]]


@pytest.mark.parametrize(
    ("output", "masked"),
    [
        ([], {5}),
        ([6], {5, 7, 6}),
        ([9], {5}),
        ([8, 9], {5, 10}),
        ([11, 9], {5, 12}),
        ([8, 9, 1], {5}),
        ([7, 8, 9], {5, 10}),
        ([6, 6], {5, 7, 6}),
    ],
)
def test_a_bad_word_is_masked_where_it_would_be_completed(output, masked):
    batch = make_batch(StageRequest({"bad_words_token_ids": BAD_WORDS}, output=output))
    assert masked_tokens(run_stages(batch, make_logits(1))[0][0]) == masked


def test_bad_words_begin_in_the_output_not_in_the_prompt():
    batch = make_batch(StageRequest({"bad_words_token_ids": [[8, 9, 10]]}, prompt=[8], output=[9]))
    assert masked_tokens(run_stages(batch, make_logits(1))[0][0]) == set()


def test_bad_words_follow_the_output_token_by_token_and_several_at_once():
    batch, seen = make_batch(StageRequest({"bad_words_token_ids": BAD_WORDS})), []
    for new in ([8], [9], [1, 6], [8, 9]):
        append(batch, 0, *new)
        seen.append(masked_tokens(run_stages(batch, make_logits(1))[0][0]))
    assert seen == [{5}, {5, 10}, {5, 6, 7}, {5, 10}]


def test_min_tokens_masks_every_end_until_enough_tokens():
    params = {"min_tokens": 2, "max_tokens": 9, "stop_token_ids": [7, 8, 2**31 - 1]}
    batch = make_batch(
        StageRequest(params, eos=[3, 500]),
        StageRequest(params),
        StageRequest({"min_tokens": 2}),
        StageRequest(eos=[3]),
    )
    seen = []
    for _ in range(4):
        rows, errors = run_stages(batch, make_logits(4))
        seen.append([masked_tokens(row) for row in rows])
        assert not errors
        for slot in range(4):
            append(batch, slot, 1)
    ends = [{3, 7, 8}, {7, 8}, set(), set()]
    assert seen == [ends, ends, [set()] * 4, [set()] * 4]


def test_min_tokens_counts_the_output_of_a_preempted_request():
    batch = make_batch(
        StageRequest({"min_tokens": 3}, output=[1, 1], eos=[3]),
        StageRequest({"min_tokens": 3}, output=[1, 1, 1], eos=[3]),
    )
    assert [masked_tokens(row) for row in run_stages(batch, make_logits(2))[0]] == [{3}, set()]


def test_biases_are_added():
    logits = make_logits(2)
    rows, _ = run_stages(
        make_batch(
            StageRequest({"logit_bias": {3: 2.5, 20: -100.0}}), StageRequest({"logit_bias": {3: 1}})
        ),
        logits,
    )
    expected = logits.numpy().copy()
    expected[0, 3] += 2.5
    expected[0, 20] -= 100.0
    expected[1, 3] += 1
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        (
            {"allowed_token_ids": [1, VOCAB_SIZE]},
            "allowed_token_ids: must hold token ids from 0 to 23, got 24",
        ),
        (
            {"bad_words_token_ids": [[1, 2**31 - 1]]},
            f"bad_words: must hold token ids from 0 to 23, got {2**31 - 1}",
        ),
        (
            {"bad_words": ["x"]},
            "bad_words: must be turned into token ids before the engine sees the request",
        ),
        ({"logit_bias": {5: 1.0, 24: 1.0}}, "logit_bias: must hold token ids from 0 to 23, got 24"),
        (
            {"logit_bias": {3: 1e300}},
            "logit_bias: must hold numbers between -1e+30 and 1e+30, got 1e+300",
        ),
    ],
)
def test_unsatisfiable_options_fail_only_their_request(params, problem):
    batch = make_batch(StageRequest(params), StageRequest({"logit_bias": {3: 1.0}}))
    assert batch.refusals == {0: RowRefusal(*problem.split(": ", 1))}
    rows, errors = run_stages(batch, make_logits(2))
    assert not errors and (rows[0] == make_logits(2)[0].numpy()).all()


def test_a_freed_slot_is_reset():
    batch = make_batch(
        StageRequest(
            {
                "allowed_token_ids": [1],
                "bad_words_token_ids": [[2]],
                "min_tokens": 2,
                "logit_bias": {1: 4.0},
            },
            eos=[3],
        )
    )
    batch.remove(0)
    batch.add(StageRequest().entering(0))
    logits = make_logits(1)
    assert batch.stages.num_slots == 0 and (run_stages(batch, logits)[0] == logits.numpy()).all()
