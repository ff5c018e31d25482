"""Log-probabilities of prompt tokens, from the hidden states of the prefill.

Must not know: layers, the cache, the sampler.

A prompt of 8192 tokens has 5 GB of fp32 logits with a vocabulary of 152 thousand, so logits are
computed piece by piece and only the requested values are kept. The logits of a piece take at most
LOGITS_BYTES in fp32, and half as much again where the head computes in bf16; tests/bench/LEDGER.md
has the measured peak. The result takes num_tokens * (k + 1) * 8 bytes; k = -1 is the whole
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...ipc.step_messages import SlotPromptLogprobs
from ...kernels.ops import AttentionMetadata
from ..input_batch import InputBatch
from ..models.adapters import AdapterRows
from .logprob_arrays import to_array

LOGITS_BYTES = 64 * 2**20
NOT_FINITE = "the model's logits for this request's prompt are not finite (NaN or infinity)"


class PromptScorer:
    def __init__(
        self,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        ops: Any,
        vocab_size: int,
        adapter_rows: AdapterRows | None = None,
    ):
        """adapter_rows: of a model whose head may have LoRA adapters."""
        self.compute_logits = compute_logits
        self.ops = ops
        self.vocab_size = vocab_size
        self.adapter_rows = adapter_rows
        self.max_piece = max(1, LOGITS_BYTES // (4 * vocab_size))  # tokens

    def __call__(
        self,
        hidden: torch.Tensor,
        slots: np.ndarray,
        metadata: AttentionMetadata,
        batch: InputBatch,
    ) -> tuple[list[SlotPromptLogprobs], dict[int, str]]:
        """hidden [T, hidden_size] of a step whose rows are `slots` [B].

        Returns each chunk's log-probabilities, and errors by slot. Position p predicts token p + 1;
        the prompt's last position predicts an output token and is not scored here.
        """
        scored, errors, start = [], {}, 0
        for slot, query_len, seq_len in zip(
            slots.tolist(), metadata.query_lens, metadata.seq_lens_list
        ):
            if slot in batch.prompt_logprobs_slots:
                num_prompt_tokens = int(batch.num_prompt_tokens[slot])
                k = min(int(batch.num_prompt_logprobs[slot]), self.vocab_size)
                # tokens to score
                first, end = seq_len - query_len + 1, min(seq_len + 1, num_prompt_tokens)
                if first < end:
                    ids, logprobs, ranks = self._score(
                        hidden[start : start + end - first],
                        batch.token_ids[slot, first:end],
                        k,
                        int(batch.adapters[slot]),
                    )
                    if np.isfinite(logprobs[:, 0]).all():
                        scored.append(
                            SlotPromptLogprobs(
                                slot, first, to_array(ids), to_array(logprobs), to_array(ranks)
                            )
                        )
                    else:
                        errors[slot] = NOT_FINITE
                if end == num_prompt_tokens:  # the last chunk: the slot is done
                    batch.end_prompt_logprobs(slot)
            start += query_len
        return scored, errors

    def _score(
        self, hidden: torch.Tensor, token_ids: np.ndarray, k: int, adapter: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """hidden [N, hidden_size], token_ids [N] -> ids and log-probabilities [N, k + 1], ranks
        [N]
        """
        num_tokens = len(token_ids)
        columns = (
            np.empty((num_tokens, k + 1), np.int32),
            np.empty((num_tokens, k + 1), np.float32),
            np.empty(num_tokens, np.int32),
        )
        targets = torch.from_numpy(token_ids.astype(np.int64)).to(hidden.device)
        for start in range(0, num_tokens, self.max_piece):
            piece = slice(start, start + self.max_piece)
            if self.adapter_rows is not None:
                self.adapter_rows.use_one(adapter, len(hidden[piece]))
            found = self.ops.gather_logprobs(self.compute_logits(hidden[piece]), targets[piece], k)
            for column, values in zip(columns, found):
                column[piece] = values.numpy(force=True)
        return columns
