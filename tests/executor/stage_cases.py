"""Requests in slots, for tests of the stages: the output of each so far, and one row of logits
each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from quire.executor.input_batch import InputBatch
from quire.executor.sampling.logits_stages import LogitsStage, LogitsStages
from quire.executor.sampling.token_stages import make_stages
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import NewRequestData
from quire.kernels import registry

VOCAB_SIZE = 24
MASKED = float("-inf")
OPS = registry.select("cpu", torch.float32)


@dataclass
class StageRequest:
    """One request: its parameters and its tokens so far."""

    params: dict[str, Any] = field(default_factory=dict)
    prompt: Sequence[int] = (1, 2, 3)
    output: Sequence[int] = ()
    eos: Sequence[int] = ()

    def entering(self, slot: int) -> NewRequestData:
        params = SamplingParams(**{"seed": 0, "temperature": 0.0, **self.params})
        return NewRequestData(
            slot,
            f"r{slot}",
            [*self.prompt, *self.output],
            len(self.prompt),
            params,
            eos_token_ids=list(self.eos),
        )


def make_batch(
    *requests: StageRequest,
    processors: Sequence = (),
    first: Sequence[LogitsStage] = (),
    max_model_len: int = 64,
) -> InputBatch:
    """Slot i holds the i-th request."""
    num_slots = max(4, len(requests))
    batch = InputBatch(
        num_slots,
        max_model_len,
        16,
        LogitsStages(  # each is asked about each request
            make_stages(OPS, VOCAB_SIZE, num_slots, max_model_len, processors, *first).stages,
            num_slots,
        ),
    )
    for slot, request in enumerate(requests):
        batch.add(request.entering(slot))
    return batch


def make_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))


def run_stages(
    batch: InputBatch, logits: torch.Tensor, slots: Sequence[int] | None = None
) -> tuple[np.ndarray, dict[int, str]]:
    """Return (the changed copy [R, VOCAB_SIZE], errors by row). Row i belongs to slots[i], by
    default to slot i.
    """
    changed = logits.clone()
    errors = batch.stages(
        changed, np.arange(len(logits)) if slots is None else np.array(slots), batch
    )
    return changed.numpy(), errors


def masked_tokens(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(row == MASKED).tolist())


def append(batch: InputBatch, slot: int, *token_ids: int) -> None:
    for token_id in token_ids:
        batch.append_tokens(np.array([slot]), np.array([token_id]))
