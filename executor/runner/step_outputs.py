"""Puts together the outputs of a step: forced tokens, several passes.

Must not know: how a token is computed or drawn.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from ...ipc.step_messages import ModelRunnerOutput
from ..sampling.logprob_arrays import join_logprobs
from .step_inputs import StepInputs


def in_order_of_step(
    inputs: StepInputs, rows: np.ndarray, token_ids: np.ndarray
) -> ModelRunnerOutput:
    """The output of a step whose `rows` [R] have sampled `token_ids` [R]."""
    by_request = np.full(len(inputs.slots), -1, np.int64)
    by_request[inputs.order[rows]] = token_ids
    has_token = by_request >= 0
    return ModelRunnerOutput(has_token.astype(int).tolist(), by_request[has_token].tolist())


def tokens_by_row(output: ModelRunnerOutput) -> list[list[int]]:
    token_ids = iter(output.token_ids)
    return [list(islice(token_ids, count)) for count in output.num_sampled]


def insert_forced(
    slots: list[int], num_sampled: list[int], token_ids: list[int], forced: dict[int, list[int]]
) -> tuple[list[int], list[int]]:
    """The columns of a ModelRunnerOutput with `forced` tokens, by slot, after each row's own."""
    counts, merged, cursor = [], [], 0
    for slot, count in zip(slots, num_sampled, strict=True):
        row = token_ids[cursor : cursor + count] + forced.get(slot, [])
        cursor += count
        counts.append(len(row))
        merged += row
    return counts, merged


def merge_outputs(
    slots: list[int], results: list[tuple[list[int], ModelRunnerOutput]]
) -> ModelRunnerOutput:
    """Merges several passes of one step over `slots`, each with the rows it computed.

    A row that failed in one of them keeps its earlier tokens: it may have ended there. In each pass
    after the first a row computes one token that it sampled, and those that the pass looked ahead.
    """
    tokens: list[list[int]] = [[] for _ in slots]
    errors = {slot: error for _, result in results for slot, error in result.errors.items()}
    num_ahead = [-1] * len(slots)
    for rows, result in results:
        for row, sampled in zip(rows, tokens_by_row(result), strict=True):
            tokens[row] += sampled
        for row, count in zip(rows, result.num_ahead):
            num_ahead[row] += 1 + count
    return ModelRunnerOutput(
        num_sampled=[len(row) for row in tokens],
        token_ids=[token_id for row in tokens for token_id in row],
        logprobs=join_logprobs(result.logprobs for _, result in results),
        errors=errors,
        prompt_logprobs=results[0][1].prompt_logprobs,
        pooled=results[0][1].pooled,
        num_ahead=num_ahead if results[0][1].num_ahead else [],
        num_drafted=[count for _, result in results for count in result.num_drafted],
        num_accepted=[count for _, result in results for count in result.num_accepted],
        grammar_s={slot: cost for _, result in results for slot, cost in result.grammar_s.items()},
    )
