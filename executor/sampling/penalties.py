"""The stage of penalties: counts the tokens of each slot's sequence and applies their cost.

Must not know: the formula (kernels: apply_penalties), the other stages, the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...ipc.step_messages import NewRequestData
from ..input_batch import InputBatch
from .change_list import ChangeList

NO_TOKEN = -1


class TokenCounts:
    """The distinct tokens of each slot and their counts in the output: [slots, max_model_len].

    The first num_ids entries of a row are valid. Counts are updated incrementally, since a sequence
    is a thousand times as long as one step's tokens. New tokens, one or many, are read from the
    slot tables. Only used slots take memory.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int):
        self.ids = np.zeros((max_num_seqs, max_model_len), np.int32)  # NO_TOKEN from num_ids on
        self.counts = np.zeros((max_num_seqs, max_model_len), np.int32)  # 0: only the prompt has it
        self.num_ids = np.zeros(max_num_seqs, np.int64)
        self.num_seen = np.zeros(max_num_seqs, np.int64)  # tokens of the sequence that are counted
        self.has_prompt = np.zeros(max_num_seqs, bool)  # else of the output only

    def reset(self, slot: int, has_prompt: bool) -> None:
        self.num_seen[slot], self.has_prompt[slot] = 0, has_prompt

    def catch_up(self, slots: np.ndarray, batch: InputBatch) -> None:
        """Counts the new tokens of slots [R], all different."""
        num_new = batch.num_tokens[slots] - self.num_seen[slots]
        is_next = (num_new == 1) & (self.num_seen[slots] > 0)
        for slot in slots[(num_new > 0) & ~is_next].tolist():
            self._recount(slot, batch)
        if is_next.any():
            self._add(
                slots[is_next], batch.token_ids[slots[is_next], self.num_seen[slots[is_next]]]
            )

    def _recount(self, slot: int, batch: InputBatch) -> None:
        num_tokens, num_prompt_tokens = batch.num_tokens[slot], batch.num_prompt_tokens[slot]
        ids = np.unique(
            batch.token_ids[slot, 0 if self.has_prompt[slot] else num_prompt_tokens : num_tokens]
        )
        output_ids, counts = np.unique(
            batch.token_ids[slot, num_prompt_tokens:num_tokens], return_counts=True
        )
        self.ids[slot], self.counts[slot] = NO_TOKEN, 0
        self.ids[slot, : len(ids)] = ids
        self.counts[slot, np.searchsorted(ids, output_ids)] = counts
        self.num_ids[slot], self.num_seen[slot] = len(ids), num_tokens

    def _add(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Counts one more output token for each of `slots` [R]."""
        # with one free place, which takes a token that is not there yet
        width = int(self.num_ids[slots].max()) + 1
        # There is no token from num_ids on, so a row finds its token or nothing.
        found = self.ids[slots, :width] == token_ids[:, None]
        is_new = ~found.any(axis=1)
        places = np.where(is_new, self.num_ids[slots], found.argmax(axis=1))
        self.ids[slots, places] = token_ids
        self.counts[slots, places] += 1
        self.num_ids[slots] += is_new
        self.num_seen[slots] += 1

    def of(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The tokens of all `slots` [R], concatenated: index into `slots` [N] i64, token ids [N]
        i64, counts [N] i32.
        """
        width = int(self.num_ids[slots].max())
        held = np.arange(width) < self.num_ids[slots][:, None]
        return (
            np.nonzero(held)[0],
            self.ids[slots, :width][held].astype(np.int64),
            self.counts[slots, :width][held],
        )


class Penalties:
    """Repetition counts prompt and output; frequency and presence count the output only."""

    parameter = "repetition_penalty"  # the only one that can make logits infinite

    def __init__(self, ops: Any, max_num_seqs: int, max_model_len: int):
        self.ops = ops
        self.counts = TokenCounts(max_num_seqs, max_model_len)
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.presence = np.zeros(max_num_seqs, np.float32)

    def enter(self, request: NewRequestData) -> bool:
        slot, params = request.slot, request.sampling_params
        self.repetition[slot] = params.repetition_penalty
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        self.counts.reset(slot, has_prompt=params.repetition_penalty != 1.0)
        return (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )

    def leave(self, slot: int) -> None:
        pass  # the next request to enter resets the slot

    def describe(
        self, changes: ChangeList, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> None:
        self.counts.catch_up(slots, batch)
        for row, slot in zip(rows.tolist(), slots.tolist()):
            columns = self.repetition, self.frequency, self.presence
            penalties = [float(column[slot]) for column in columns]
            held = slice(int(self.counts.num_ids[slot]))
            changes.penalise(
                row, self.counts.ids[slot, held], self.counts.counts[slot, held], penalties
            )

    def apply(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> None:
        self.counts.catch_up(slots, batch)
        index, token_ids, counts = self.counts.of(slots)

        def upload(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(logits.device)

        penalties = (
            upload(values[slots][index])
            for values in (self.repetition, self.frequency, self.presence)
        )
        self.ops.apply_penalties(
            logits, upload(rows[index]), upload(token_ids), upload(counts), *penalties
        )
