"""Pools the hidden states of requests that want no tokens, over the chunks of their prompts.

Must not know: models, which requests run beside each other, text.

Results are computed in fp32, one request at a time, and rows are added in the order of the prompt's
tokens. So the bits of a result depend neither on the batch nor on how the prompt is cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...ipc.models.pooling import Pooling
from ...ipc.params import PoolingParams
from ...ipc.step_messages import SlotPooled
from ...kernels.ops import AttentionMetadata
from ..runner.input_batch import InputBatch
from ..sampling.logprob_arrays import to_array
from .modes import Collected, make_modes

NOT_FINITE = "the model's hidden states are not finite"
MISSING_TOKENS = "pooling reads all tokens of the prompt, and the first were not computed"


class Pooler:
    """`pooling`: how the model pools."""

    def __init__(self, pooling: Pooling):
        self.pooling = pooling
        self._modes = make_modes(pooling.modes)
        self._unfinished: dict[int, Collected] = {}  # by slot, between two chunks

    def __call__(
        self,
        hidden: torch.Tensor,
        slots: np.ndarray,
        metadata: AttentionMetadata,
        batch: InputBatch,
    ) -> tuple[list[SlotPooled], dict[int, str]]:
        """hidden [T, hidden_size] of a step whose rows are `slots` [B].

        Returns the results of the requests whose prompts are complete, and errors by slot.
        """
        pooled, errors, end = [], {}, 0
        for slot, query_len, seq_len in zip(
            slots.tolist(), metadata.query_lens, metadata.seq_lens_list
        ):
            start, end = end, end + query_len
            params = batch.pooling.get(slot)
            if params is None:
                continue
            num_tokens = int(batch.num_prompt_tokens[slot])
            try:
                collected = self._collected(slot, params, seq_len - query_len)
                collected.take(hidden[start:end].float().numpy(force=True), num_tokens)
            except ValueError as error:
                errors[slot] = str(error)
                continue
            if seq_len < num_tokens:
                continue
            del self._unfinished[slot]
            values = self._finish(collected, params)
            if np.isfinite(values).all():
                pooled.append(SlotPooled(slot, to_array(values)))
            else:
                errors[slot] = NOT_FINITE
        return pooled, errors

    def use_model(self, model: Any) -> None:
        """Other weights are in use, or none: no request is half pooled."""
        self._unfinished.clear()

    def _collected(self, slot: int, params: PoolingParams, first: int) -> Collected:
        """The state of a request whose next token has the index `first` in its prompt."""
        known = self._unfinished.get(slot)
        if known is not None and known.num_taken == first:
            return known
        if first and (params.is_by_token or self.pooling.reads_all_tokens):
            raise ValueError(MISSING_TOKENS)
        self._unfinished[slot] = made = Collected(self._modes, params.is_by_token, first)
        return made

    def _finish(self, collected: Collected, params: PoolingParams) -> np.ndarray:
        """f4 [size], or [num_tokens, size]"""
        values = collected.result()
        dimensions = params.dimensions or self.pooling.dimensions
        if dimensions is not None:
            values = values[..., :dimensions]
        is_active = params.use_activation is not False
        if is_active and self.pooling.activation == "normalize":
            values = normalized(values)
        return np.ascontiguousarray(values, np.float32)


def normalized(values: np.ndarray) -> np.ndarray:
    """f4 [..., size] divided by the Euclidean norm of its last dimension, of at least 1e-12, as
    torch.nn.functional.normalize does. The norm is summed in fp64.
    """
    squares = np.square(values, dtype=np.float64).sum(-1, keepdims=True)
    return (values / np.maximum(np.sqrt(squares), 1e-12)).astype(np.float32)
