"""Joins the outputs of several passes of a step.

Must not know: torch, the model, what ran the passes.
"""

from __future__ import annotations

from itertools import islice

from ...ipc.step_messages import ModelRunnerOutput
from ..sampling.logprob_arrays import join_logprobs


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


def tokens_by_row(output: ModelRunnerOutput) -> list[list[int]]:
    token_ids = iter(output.token_ids)
    return [list(islice(token_ids, count)) for count in output.num_sampled]
