"""The stages that mask or bias single tokens, and the list of all stages.

Must not know: text (the frontend converts words to tokens), the model, sampling.

These are allowed_token_ids, bad_words, min_tokens and logit_bias.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...ipc.errors import InvalidParameterError
from ...ipc.params import SamplingParams
from ...ipc.step_messages import NewRequestData
from ..input_batch import InputBatch
from .change_list import ChangeList
from .logits_processors import LoadedProcessor, UserProcessors
from .logits_stages import LogitsStage, LogitsStages
from .penalties import Penalties

MASKED = float("-inf")
LARGEST_BIAS = 1e30  # near the end of fp32; the frontend's own limit is 100


def make_stages(
    ops: Any,
    vocab_size: int,
    max_num_seqs: int,
    max_model_len: int,
    processors: Sequence[LoadedProcessor] = (),
    *first: LogitsStage,
) -> LogitsStages:
    """All stages in the order of logits_stages.py, after `first` (the grammar's)."""
    stages: list[LogitsStage] = [
        *first,
        AllowedTokenIds(vocab_size),
        BadWords(vocab_size),
        MinTokens(vocab_size, max_num_seqs),
        LogitBias(vocab_size),
        UserProcessors(processors),
        Penalties(ops, max_num_seqs, max_model_len),
    ]
    if processors:  # any request may use one
        return LogitsStages(stages, max_num_seqs)
    return LogitsStages(stages, max_num_seqs, asks_for_stage)


def asks_for_stage(params: SamplingParams) -> bool:
    """Whether one of the stages may apply to a request with these parameters."""
    return (
        params.structured_outputs is not None
        or params.allowed_token_ids is not None
        or bool(params.bad_words_token_ids or params.bad_words)
        or bool(params.min_tokens or params.logit_bias)
        or params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def check_token_ids(parameter: str, token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Checks that ids are in the vocabulary; returns them as [N] i64.

    The frontend refuses other ids, but another client may not, and here they would be out-of-bounds
    indices.
    """
    checked = np.array(list(token_ids), np.int64)
    if len(checked) and checked.max() >= vocab_size:
        raise InvalidParameterError(
            parameter, f"must hold token ids from 0 to {vocab_size - 1}, got {checked.max()}"
        )
    return checked


def index_pairs(
    rows: np.ndarray, token_ids: Sequence[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of logits[row, token] for every token of every row.

    rows [R], token_ids one array per row -> two tensors [N] i64.
    """

    def moved(column: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column.astype(np.int64, copy=False)).to(device)

    return moved(np.repeat(rows, [len(ids) for ids in token_ids])), moved(np.concatenate(token_ids))


class AllowedTokenIds:
    parameter = "allowed_token_ids"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._token_ids: dict[int, np.ndarray] = {}  # by slot

    def enter(self, request: NewRequestData) -> bool:
        allowed = request.sampling_params.allowed_token_ids
        if allowed is None:
            return False
        self._token_ids[request.slot] = check_token_ids(
            "allowed_token_ids", allowed, self.vocab_size
        )
        return True

    def leave(self, slot: int) -> None:
        del self._token_ids[slot]

    def apply(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> None:
        index = index_pairs(rows, [self._token_ids[slot] for slot in slots.tolist()], logits.device)
        kept = logits[index]
        logits.index_fill_(0, torch.from_numpy(rows).to(logits.device), MASKED)
        logits[index] = kept

    def describe(
        self, changes: ChangeList, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> None:
        for row, slot in zip(rows.tolist(), slots.tolist()):
            changes.allow(row, self._token_ids[slot])


@dataclass(frozen=True)
class _Words:
    """The words of one slot.

    Longer words are found by the token before their last: one look-up per step, whatever their
    number.
    """

    single: np.ndarray  # [N] i64, words of one token
    # token before the last -> (all tokens but the last, last token)
    longer: dict[int, list[tuple[list[int], int]]]


class BadWords:
    """Masks the token that would complete a word: its other tokens must end the output.

    As in vLLM, the prompt does not count.
    """

    parameter = "bad_words"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self._words: dict[int, _Words] = {}  # by slot

    def enter(self, request: NewRequestData) -> bool:
        params = request.sampling_params
        if not params.bad_words_token_ids:
            if params.bad_words:
                raise InvalidParameterError(
                    "bad_words", "must be turned into token ids before the engine sees the request"
                )
            return False
        single, longer = [], {}
        for word in params.bad_words_token_ids:
            check_token_ids("bad_words", word, self.vocab_size)
            if len(word) == 1:
                single += word
            else:
                longer.setdefault(word[-2], []).append((word[:-1], word[-1]))
        self._words[request.slot] = _Words(np.array(single, np.int64), longer)
        return True

    def leave(self, slot: int) -> None:
        del self._words[slot]

    def apply(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> None:
        logits[
            index_pairs(
                rows, [self._completions(slot, batch) for slot in slots.tolist()], logits.device
            )
        ] = MASKED

    def describe(
        self, changes: ChangeList, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> None:
        for row, slot in zip(rows.tolist(), slots.tolist()):
            changes.mask(row, self._completions(slot, batch))

    def _completions(self, slot: int, batch: InputBatch) -> np.ndarray:
        words, end = self._words[slot], int(batch.num_tokens[slot])
        num_output_tokens = end - int(batch.num_prompt_tokens[slot])
        if not words.longer or not num_output_tokens:
            return words.single
        candidates = words.longer.get(int(batch.token_ids[slot, end - 1]), ())
        completed = [
            last
            for beginning, last in candidates
            if len(beginning) <= num_output_tokens
            and batch.token_ids[slot, end - len(beginning) : end].tolist() == beginning
        ]
        return np.concatenate((words.single, np.array(completed, np.int64)))


class MinTokens:
    parameter = "min_tokens"

    def __init__(self, vocab_size: int, max_num_seqs: int):
        self.vocab_size = vocab_size
        self.min_tokens = np.zeros(max_num_seqs, np.int64)
        self._token_ids: dict[int, np.ndarray] = {}  # by slot

    def enter(self, request: NewRequestData) -> bool:
        params = request.sampling_params
        if not params.min_tokens:
            return False
        ids = {*request.eos_token_ids, *(params.stop_token_ids or ())}
        # an id that no token has ends nothing
        ids = [token_id for token_id in ids if 0 <= token_id < self.vocab_size]
        if ids:
            self._token_ids[request.slot] = np.array(ids, np.int64)
            self.min_tokens[request.slot] = params.min_tokens
        return bool(ids)

    def leave(self, slot: int) -> None:
        del self._token_ids[slot]

    def apply(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> None:
        is_short = self._are_short(slots, batch)
        if is_short.any():
            token_ids = [self._token_ids[slot] for slot in slots[is_short].tolist()]
            logits[index_pairs(rows[is_short], token_ids, logits.device)] = MASKED

    def describe(
        self, changes: ChangeList, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> None:
        is_short = self._are_short(slots, batch)
        for row, slot in zip(rows[is_short].tolist(), slots[is_short].tolist()):
            changes.mask(row, self._token_ids[slot])

    def _are_short(self, slots: np.ndarray, batch: InputBatch) -> np.ndarray:
        return batch.num_tokens[slots] - batch.num_prompt_tokens[slots] < self.min_tokens[slots]


class LogitBias:
    parameter = "logit_bias"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        # by slot: token ids [N] i64, biases [N] f32
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def enter(self, request: NewRequestData) -> bool:
        biases = request.sampling_params.logit_bias
        if not biases:
            return False
        token_ids = check_token_ids("logit_bias", biases, self.vocab_size)
        largest = max(biases.values(), key=abs)
        if abs(largest) > LARGEST_BIAS:
            raise InvalidParameterError(
                "logit_bias",
                f"must hold numbers between -{LARGEST_BIAS} and {LARGEST_BIAS}, got {largest}",
            )
        self._biases[request.slot] = token_ids, np.array(list(biases.values()), np.float32)
        return True

    def leave(self, slot: int) -> None:
        del self._biases[slot]

    def apply(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> None:
        mine = [self._biases[slot] for slot in slots.tolist()]
        index = index_pairs(rows, [token_ids for token_ids, _ in mine], logits.device)
        logits[index] += torch.from_numpy(np.concatenate([biases for _, biases in mine])).to(
            logits.device
        )

    def describe(
        self, changes: ChangeList, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> None:
        for row, slot in zip(rows.tolist(), slots.tolist()):
            changes.add(row, *self._biases[slot])
