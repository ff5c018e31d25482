"""Between the model's logits and the draw: the stages that change a row, in one order, and who of
the step wants which.

Must not know: what a stage computes, the model, the draw itself.

The order is vLLM V1's; a user's result depends on it, so it is written here and tested
(tests/executor/sampling/test_logits_stages.py):

    0  log-probabilities, prompt's and output's: of the model's own logits, before anything below     sampler.py, prompt_logprobs.py
    1  the grammar's mask                                                                             structured output's own stage
    2  allowed_token_ids: all others are masked                                                       token_stages.py
    3  bad_words: the last token of a word whose other tokens end the output is masked                token_stages.py
    4  min_tokens: until there are so many, end-of-sequence and stop tokens are masked                token_stages.py
    5  logit_bias: added                                                                              token_stages.py
    6  the user's own logits processors, in the order of the configuration                            logits_processors.py
    7  penalties: repetition, then frequency, then presence                                           penalties.py
    8  the draw: temperature, min_p, top_k, top_p, Gumbel noise; greedy requests take the largest     kernels: sample_tokens

Masked means -inf: no later stage revives such a token but a processor of the user's own. A row on
which all tokens are masked is an error of its request. Stages 1 to 7 are objects of one interface
in one list (make_stages in token_stages.py). They keep what they need by slot, and change rows in
place; a stage that no request of the step wants is not called, and where none has any, a step pays
one comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from ...ipc.errors import InvalidParameterError
from ...ipc.messages import NewRequestData
from ..runner.input_batch import InputBatch

ALL_MASKED = "no token is left to choose from: structured_outputs, allowed_token_ids, bad_words, min_tokens and logits processors together mask all"
NOT_FINITE = "penalties or logits processors made the request's logits NaN or infinite"


class LogitsStage(Protocol):
    """What a request wants of it comes with `enter`, and stays by slot until `leave`.

    Between two calls of `apply` a slot may have gained no token, one or several: batch.token_ids
    and batch.num_tokens tell. A request that was preempted enters again with its output so far.
    """

    def enter(self, request: NewRequestData) -> bool:
        """Whether this request wants the stage.

        Raises InvalidParameterError where it asks for the impossible: its own error.
        """
        ...

    def leave(self, slot: int) -> None:
        """The request is gone; only called for slots that wanted the stage."""

    def apply(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> dict[int, str] | None:
        """Changes `rows` [R] of logits [B, vocab_size] f32 in place, and no others; `slots` [R] are
        theirs.

        Returns what went wrong with a request alone, row -> sentence, or None.
        """


class LogitsStages:
    """The stages in their order, and the table of who wants which."""

    def __init__(self, stages: Sequence[LogitsStage] = (), max_num_seqs: int = 0):
        self.stages = list(stages)
        self._wants = np.zeros((len(self.stages), max_num_seqs), bool)
        self.num_slots = 0  # that want any stage

    def enter(self, request: NewRequestData) -> None:
        """Raises InvalidParameterError; the slot then wants no stage."""
        self.leave(request.slot)
        if not self.stages:
            return
        wants = self._wants[:, request.slot]
        try:
            for index, stage in enumerate(self.stages):
                wants[index] = stage.enter(request)
        except InvalidParameterError:
            self.leave(request.slot)
            raise
        self._count()

    def leave(self, slot: int) -> None:
        """Also for slots that are free already."""
        if self.num_slots == 0 and not self._wants[:, slot].any():
            return
        for index in np.flatnonzero(self._wants[:, slot]):
            self.stages[index].leave(slot)
        self._wants[:, slot] = False
        self._count()

    def are_wanted_by(self, slots: list[int]) -> bool:
        """By any of them."""
        return self.num_slots > 0 and bool(self._wants[:, slots].any())

    def _count(self) -> None:
        self.num_slots = int(self._wants.any(axis=0).sum())

    def __call__(
        self, logits: torch.Tensor, slots: np.ndarray, batch: InputBatch
    ) -> dict[int, str]:
        """Changes logits [R, vocab_size] f32, all finite, in place; slots [R].

        Returns errors, row -> sentence; those rows mean nothing.
        """
        if not self.num_slots:
            return {}
        wants = self._wants[:, slots]
        changed = wants.any(axis=0)
        if not changed.any():
            return {}
        errors: dict[int, str] = {}
        for stage, mine in zip(self.stages, wants):
            rows = np.flatnonzero(mine)
            if len(rows):
                errors |= stage.apply(logits, rows, slots[rows], batch) or {}
        largest = logits.amax(-1).numpy(force=True)  # NaN where any is
        for row in np.flatnonzero(changed & ~np.isfinite(largest)).tolist():
            errors.setdefault(row, ALL_MASKED if largest[row] == -np.inf else NOT_FINITE)
        return errors
