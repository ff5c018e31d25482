"""From logits to tokens: one row per request that samples in this step.
May know: the table of operations, the slots' sampling parameters.
Must not know: the model, the cache, who scheduled what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..ipc.messages import Array, SlotLogprobs
from .device import argmax
from .input_batch import NO_LOGPROBS, InputBatch


@dataclass(frozen=True)
class SamplerOutput:
    """Rows parallel with the slots that were given. token_ids of rows in `bad_rows` mean nothing."""

    token_ids: np.ndarray  # [R] i64
    bad_rows: list[int]  # rows whose logits are not finite
    logprobs: list[SlotLogprobs]


class Sampler:
    def __init__(self, ops: Any):
        self.ops = ops

    def __call__(self, logits: torch.Tensor, batch: InputBatch, slots: np.ndarray) -> SamplerOutput:
        """logits [R, vocab_size] f32 on the device, slots [R]. Each token is a function of its row, its seed and its position alone."""
        # A sum is not finite exactly where a term is not (finite logits are far from overflowing it): one pass, one number per row.
        bad_rows = np.flatnonzero(~np.isfinite(logits.sum(-1).numpy(force=True))).tolist()
        if bad_rows:
            logits = logits.index_fill(0, torch.tensor(bad_rows, device=logits.device), 0.0)
        token_ids = self._choose(logits, batch, slots)
        logprobs = self._gather_logprobs(logits, token_ids, batch, slots, bad_rows)
        return SamplerOutput(token_ids, bad_rows, logprobs)

    def _choose(self, logits: torch.Tensor, batch: InputBatch, slots: np.ndarray) -> np.ndarray:
        """[R] i64"""
        temperature = batch.temperature[slots]
        if not temperature.any():
            return argmax(logits)

        def column(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values).to(logits.device)

        token_ids = self.ops.sample_tokens(
            logits,
            column(temperature),
            column(batch.top_k[slots]),
            column(batch.top_p[slots]),
            column(batch.min_p[slots]),
            column(batch.seeds[slots]),
            column(batch.num_tokens[slots]),  # the new token's index in the sequence
        )
        return token_ids.numpy(force=True)

    def _gather_logprobs(
        self, logits: torch.Tensor, token_ids: np.ndarray, batch: InputBatch, slots: np.ndarray, bad_rows: list[int]
    ) -> list[SlotLogprobs]:
        counts = batch.num_logprobs[slots]
        rows = np.flatnonzero(counts != NO_LOGPROBS)
        if not len(rows):
            return []
        index, chosen = (torch.from_numpy(values).to(logits.device) for values in (rows, token_ids[rows]))
        # One call for the largest k; a row that asked for fewer takes the head of its line.
        gathered = self.ops.gather_logprobs(logits[index], chosen, int(counts[rows].max()))
        ids, logprobs, ranks = (tensor.numpy(force=True) for tensor in gathered)
        return [
            SlotLogprobs(
                int(slots[row]),
                _array(ids[i : i + 1, : counts[row] + 1]),
                _array(logprobs[i : i + 1, : counts[row] + 1]),
                _array(ranks[i : i + 1]),
            )
            for i, row in enumerate(rows)
            if row not in bad_rows
        ]


def _array(values: np.ndarray) -> Array:
    return Array(f"{values.dtype.kind}{values.dtype.itemsize}", values.shape, values.tobytes())
