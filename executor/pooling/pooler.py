"""Pools the hidden states of requests that want no tokens, over the chunks of their prompts.

Must not know: models, which requests run beside each other, text.

Results are computed in fp32, and rows are added in the order of the prompt's tokens. So the bits of
a result depend neither on the batch nor on how the prompt is divided into chunks.
"""

from __future__ import annotations

import numpy as np
import torch

from ...ipc.models.pooling import Pooling
from ...ipc.params import PoolingParams
from ...ipc.step_messages import SlotPooled
from ...kernels.ops import AttentionMetadata
from ..input_batch import InputBatch
from ..sampling.logprob_arrays import to_array
from .heads import LAST_ACTIVATIONS, PoolingHead, Rows
from .modes import Collected, make_modes

NOT_FINITE = "the model's hidden states are not finite"
MISSING_TOKENS = "pooling reads all tokens of the prompt, and the first were not computed"


class Pooler:
    def __init__(self, pooling: Pooling, dense: PoolingHead, classifier: PoolingHead):
        """pooling: how the model pools. dense: its Dense modules. classifier: the model's head."""
        self.pooling = pooling
        self._modes = make_modes(pooling.modes)
        self._dense, self._classifier = dense, classifier
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
        done: dict[int, np.ndarray] = {}
        errors: dict[int, str] = {}
        end, whole = 0, None
        if self.pooling.reads_all_tokens:  # one conversion for the step
            whole = hidden.float().numpy(force=True)
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
                if whole is not None:
                    rows = whole[start:end]
                else:
                    first = start if params.is_by_token else end - 1
                    collected.skip(first - start)
                    rows = hidden[first:end].float().numpy(force=True)
                collected.take(rows, num_tokens)
            except ValueError as error:
                errors[slot] = str(error)
                continue
            if seq_len == num_tokens:
                del self._unfinished[slot]
                done[slot] = collected.result()
        return self._finish(done, batch, errors), errors

    def _collected(self, slot: int, params: PoolingParams, first: int) -> Collected:
        """The state of a request whose next token has the index `first` in its prompt."""
        known = self._unfinished.get(slot)
        if known is not None and known.num_taken == first:
            return known
        if first and (params.is_by_token or self.pooling.reads_all_tokens):
            raise ValueError(MISSING_TOKENS)
        skipped = 0 if self.pooling.include_prompt else params.instruction_length
        self._unfinished[slot] = made = Collected(self._modes, params.is_by_token, first, skipped)
        return made

    def _finish(
        self, done: dict[int, np.ndarray], batch: InputBatch, errors: dict[int, str]
    ) -> list[SlotPooled]:
        """done: by slot [size], or [num_tokens, size]. Adds to `errors`."""
        results = {}
        for head, tasks in (
            (self._dense, ("embed", "token_embed")),
            (self._classifier, ("classify", "token_classify")),
        ):
            mine = [slot for slot in done if batch.pooling[slot].task in tasks]
            if not mine:
                continue
            for slot, values in zip(mine, head([np.atleast_2d(done[slot]) for slot in mine])):
                values = self._end(values, batch.pooling[slot])
                results[slot] = values[0] if done[slot].ndim == 1 else values
        pooled = []
        for slot in done:
            if np.isfinite(results[slot]).all():
                pooled.append(SlotPooled(slot, to_array(results[slot])))
            else:
                errors[slot] = NOT_FINITE
        return pooled

    def _end(self, values: Rows, params: PoolingParams) -> Rows:
        """f4 [n, features] behind the head -> the result"""
        pooling = self.pooling
        if params.task in ("classify", "token_classify"):
            if (pooling.logit_mean, pooling.logit_sigma) != (0.0, 1.0):
                values = (values - np.float32(pooling.logit_mean)) / np.float32(pooling.logit_sigma)
        elif (dimensions := params.dimensions or pooling.dimensions) is not None:
            values = values[:, :dimensions]
        if params.use_activation is not False:
            values = LAST_ACTIVATIONS[pooling.activation](values)
        return np.ascontiguousarray(values, np.float32)
