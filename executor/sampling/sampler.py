"""Samples tokens from logits: one row per request that samples in this step.

Must not know: the model, the cache, why a row was scheduled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...ipc.step_messages import RowError, SlotLogprobs
from ..input_batch import NO_LOGPROBS, InputBatch
from .logprob_arrays import to_array

NOT_FINITE = "the model's logits for this request are not finite (NaN or infinity)"


@dataclass(frozen=True)
class SamplerOutput:
    """Rows are parallel to the given slots. token_ids of rows in `errors` are undefined."""

    token_ids: np.ndarray  # [R] i64
    errors: dict[int, RowError]  # row -> the error of this request
    logprobs: list[SlotLogprobs]


class ParameterColumns:
    """The columns of sample_tokens for the slots of a step, kept while the same requests continue:
    the step's array of slots is the same object then.
    """

    def __init__(self, batch: InputBatch):
        self._batch = batch
        self._slots: np.ndarray | None = None
        self._num_added = -1
        self._columns: list[torch.Tensor | None] = []

    def of(self, slots: np.ndarray, device: torch.device) -> list[torch.Tensor | None]:
        """See draw_parameters."""
        if slots is not self._slots or self._batch.num_added != self._num_added:
            self._slots, self._num_added = slots, self._batch.num_added
            self._columns = draw_parameters(self._batch, slots, device)
        return self._columns


class Sampler:
    def __init__(self, ops: Any):
        self.ops = ops

    def __call__(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        slots: np.ndarray,
        largest: tuple[torch.Tensor, ...] | None = None,
        positions: np.ndarray | None = None,
    ) -> SamplerOutput:
        """logits [R, vocab_size] f32 on the device, overwritten; slots [R], all different.

        `largest`: the result of argmax over the logits, if known. `positions` [R]: of the sampled
        tokens in their sequences, where they are not the next ones; slots may then be equal, and
        none may use a stage.

        A token depends only on its row, its request's parameters and tokens, its seed and its
        position. See logits_stages.py for the order of the stages.
        """
        found = largest or self.ops.argmax(logits)
        token_ids, is_finite = (column.numpy(force=True) for column in found)
        errors: dict[int, RowError] = {}
        logprobs: list[SlotLogprobs] = []
        raw_logits = None
        if not is_finite.all():
            errors = dict.fromkeys(np.flatnonzero(~is_finite).tolist(), NOT_FINITE)
            self._clear(logits, errors)
        wanted = np.flatnonzero(batch.num_logprobs[slots] != NO_LOGPROBS)
        if batch.logprobs_slots and len(wanted):
            raw_logits = self._keep(logits, wanted, batch)
        if batch.stages.num_slots:
            staged = batch.stages(logits, slots, batch)
            self._clear(logits, staged)
            errors = staged | errors
        if batch.draws(slots):
            token_ids = self._draw(logits, batch, slots, positions)
        elif batch.stages.num_slots:  # the stages may have changed which logit is largest
            token_ids = self.ops.argmax(logits)[0].numpy(force=True)
        if raw_logits is not None:
            logprobs = self._gather_logprobs(raw_logits, wanted, token_ids, batch, slots, errors)
        return SamplerOutput(token_ids, errors, logprobs)

    @staticmethod
    def _keep(logits: torch.Tensor, rows: np.ndarray, batch: InputBatch) -> torch.Tensor:
        """[N, vocab_size] of `rows` [N] before the stages: a copy, unless all rows are wanted and
        no stage changes them.
        """
        if len(rows) == len(logits) and not batch.stages.num_slots:
            return logits
        return logits[torch.from_numpy(rows).to(logits.device)]

    @staticmethod
    def _clear(logits: torch.Tensor, rows: dict[int, RowError]) -> None:
        """Makes rows in error safe to sample from."""
        if rows:
            logits.index_fill_(0, torch.tensor(list(rows), device=logits.device), 0.0)

    def _draw(
        self,
        logits: torch.Tensor,
        batch: InputBatch,
        slots: np.ndarray,
        positions: np.ndarray | None,
    ) -> np.ndarray:
        """[R] i64"""
        if positions is None:
            positions = batch.num_tokens[slots]
        on_device = torch.from_numpy(positions).to(logits.device)
        parameters = draw_parameters(batch, slots, logits.device)
        return self.ops.sample_tokens(logits, *parameters, on_device).numpy(force=True)

    def _gather_logprobs(
        self,
        raw_logits: torch.Tensor,
        rows: np.ndarray,
        token_ids: np.ndarray,
        batch: InputBatch,
        slots: np.ndarray,
        errors: dict[int, RowError],
    ) -> list[SlotLogprobs]:
        """raw_logits [N, vocab_size] of `rows` [N].

        One call per k, so that a row's result does not depend on its neighbours' k.
        """
        counts = np.minimum(batch.num_logprobs[slots[rows]], raw_logits.shape[1])
        chosen = torch.from_numpy(token_ids[rows]).to(raw_logits.device)
        entries: dict[int, SlotLogprobs] = {}
        for k in np.unique(counts).tolist():
            mine = np.flatnonzero(counts == k)
            index = torch.from_numpy(mine).to(raw_logits.device)
            some = raw_logits if len(mine) == len(rows) else raw_logits[index]
            ids, logprobs, ranks = (
                t.numpy(force=True) for t in self.ops.gather_logprobs(some, chosen[index], k)
            )
            for i, row in enumerate(rows[mine].tolist()):
                one = slice(i, i + 1)
                entries[row] = SlotLogprobs(
                    int(slots[row]),
                    to_array(ids[one]),
                    to_array(logprobs[one]),
                    to_array(ranks[one]),
                )
        return [entries[row] for row in rows.tolist() if row not in errors]


def draw_parameters(
    batch: InputBatch, slots: np.ndarray, device: torch.device
) -> list[torch.Tensor | None]:
    """The columns [R] of sample_tokens for `slots` [R], except the positions."""
    filters = (
        (batch.top_k, batch.top_p, batch.min_p) if batch.filtered_slots else (None, None, None)
    )
    columns = batch.temperature, *filters, batch.seeds
    return [
        None if values is None else torch.from_numpy(values[slots]).to(device) for values in columns
    ]
