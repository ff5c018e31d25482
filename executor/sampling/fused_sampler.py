"""Samples as sampler.py does, in at most three launches whatever the requests ask for: changes of
logits, and the two of a draw that filters, which computes log-probabilities too.

Must not know: the model, the cache, why a row was scheduled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...ipc.step_messages import RowError, SlotLogprobs
from ...kernels.choice import MOST_LOGPROBS, NOT_SCORED, OWN_LOGITS
from ..input_batch import NO_LOGPROBS, InputBatch
from .change_list import ChangeList
from .logprob_arrays import to_array
from .sampler import NOT_FINITE, Sampler, SamplerOutput, draw_parameters


class FusedSampler:
    """Implements Sampler's call. Nothing is read from the device before all has been launched.

    Steps with a user's logits processors, or with more than MOST_LOGPROBS log-probabilities of a
    row, are those of Sampler.
    """

    def __init__(self, ops: Any):
        self.ops, self.by_stages = ops, Sampler(ops)

    def __call__(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        slots: np.ndarray,
        largest: tuple[torch.Tensor, ...] | None = None,
        positions: np.ndarray | None = None,
    ) -> SamplerOutput:
        """See Sampler. `largest` is overwritten."""
        vocab_size, wanted = logits.shape[1], batch.num_logprobs[slots]
        k = int(np.minimum(wanted, vocab_size).max(initial=NO_LOGPROBS))
        if k > MOST_LOGPROBS or not batch.stages.are_described(slots):
            return self.by_stages(logits, batch, slots, largest, positions)
        token_ids, is_finite = largest or self.ops.argmax(logits)
        raw, raw_rows = logits, np.where(wanted == NO_LOGPROBS, NOT_SCORED, OWN_LOGITS)
        errors: dict[int, RowError] = {}
        changes, peaks = ChangeList(vocab_size), None
        if batch.stages.num_slots:
            errors = batch.stages.describe(changes, slots, batch)
        changed = changes.rows()
        if len(changed):
            copied = changed[raw_rows[changed] == OWN_LOGITS]
            raw_rows[copied] = np.arange(len(copied))
            raw = logits.new_empty(max(len(copied), 1), vocab_size)
            on_device = changes.on(logits.device, np.maximum(raw_rows[changed], OWN_LOGITS))
            peaks = self.ops.change_logits(logits, token_ids, raw, on_device)
        token_ids, *scores = self._choose(
            logits, token_ids, batch, slots, positions, raw, raw_rows, k
        )
        if peaks is not None:
            errors = batch.stages.errors_of(changed, peaks.numpy(force=True), slots) | errors
        finite = is_finite.numpy(force=True)
        errors |= dict.fromkeys(np.flatnonzero(~finite).tolist(), NOT_FINITE)
        logprobs = scored(scores, slots, np.minimum(wanted, vocab_size), errors) if scores else []
        return SamplerOutput(token_ids.numpy(force=True), errors, logprobs)

    def _choose(
        self,
        logits: torch.Tensor,
        largest: torch.Tensor,
        batch: InputBatch,
        slots: np.ndarray,
        positions: np.ndarray | None,
        raw: torch.Tensor,
        raw_rows: np.ndarray,
        k: int,
    ) -> tuple[torch.Tensor, ...]:
        """-> token ids [R] i64 and, if any row is scored, the other results of choose_tokens."""
        columns: list[torch.Tensor | None] = [None] * 6
        if batch.draws(slots):
            if positions is None:
                positions = batch.num_tokens[slots]
            on_device = torch.from_numpy(positions).to(logits.device)
            columns = [*draw_parameters(batch, slots, logits.device), on_device]
            if k == NO_LOGPROBS:
                return (self.ops.sample_tokens(logits, *columns, largest),)
        elif k == NO_LOGPROBS:
            return (largest,)
        rows = torch.from_numpy(raw_rows.astype(np.int64)).to(logits.device)
        return self.ops.choose_tokens(logits, largest, *columns, raw, rows, k)


def scored(
    scores: list[torch.Tensor], slots: np.ndarray, counts: np.ndarray, errors: dict[int, RowError]
) -> list[SlotLogprobs]:
    """scores: ids and log-probabilities [R, k + 1] and ranks [R]. counts [R]: how many others each
    row wants.
    """
    ids, logprobs, ranks = (column.numpy(force=True) for column in scores)
    entries = []
    for row in np.flatnonzero(counts != NO_LOGPROBS).tolist():
        if row not in errors:
            end, one = int(counts[row]) + 1, slice(row, row + 1)
            columns = ids[one, :end], logprobs[one, :end], ranks[one]
            entries.append(SlotLogprobs(int(slots[row]), *map(to_array, columns)))
    return entries
