"""Runs steps with lookahead tokens pass by pass, and joins the outputs of several passes.

Must not know: the model, how a row is sampled, what decides how far to look ahead.
"""

from __future__ import annotations

from itertools import islice

from ...ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ..input_batch import InputBatch
from ..sampling.logprob_arrays import join_logprobs
from .plain_step import OnePass


class LookAhead:
    """A StepRunner: the first pass, then a pass for each lookahead token."""

    def __init__(self, batch: InputBatch, step: OnePass):
        self._batch, self.step = batch, step

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See StepRunner."""
        return self.follow(scheduler_output, self.step.execute_model(scheduler_output))

    def follow(
        self, scheduler_output: SchedulerOutput, first: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        """The output of the whole step, after the output of its first pass."""
        if any(scheduler_output.num_lookahead_tokens):
            return self._decode(scheduler_output, first)
        return first

    def _decode(
        self, scheduler_output: SchedulerOutput, first: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        slots, wanted = scheduler_output.slots, scheduler_output.num_lookahead_tokens
        results = [(list(range(len(slots))), first)]
        rows = [row for row, num_sampled in enumerate(first.num_sampled) if num_sampled]
        for count in range(1, max(wanted) + 1):
            rows = [
                row
                for row in rows
                if wanted[row] >= count and slots[row] not in results[-1][1].errors
            ]
            if not rows:
                break
            row_slots = [slots[row] for row in rows]
            decodes = SchedulerOutput(
                step=scheduler_output.step,
                slots=row_slots,
                num_scheduled_tokens=[1] * len(rows),
                num_computed_tokens=(self._batch.num_tokens[row_slots] - 1).tolist(),
                new_block_ids=[],
            )
            results.append((rows, self.step.execute_model(decodes)))
        return merge_outputs(slots, results)


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
