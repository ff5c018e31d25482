"""The stages that change logits before sampling, their order, and which slots use which stage.

Must not know: what a stage computes, the model, sampling itself.

The order is vLLM V1's. Results depend on it, so it is written here and tested
(tests/executor/sampling/test_logits_stages.py):

    0  log-probabilities of prompt and output,
       from the model's own logits                    sampler.py, prompt_logprobs.py
    1  the grammar's mask                             grammar.py
    2  allowed_token_ids: masks all others            token_stages.py
    3  bad_words: masks the last token of a word
       whose other tokens end the output              token_stages.py
    4  min_tokens: masks end-of-sequence and stop
       tokens until there are that many               token_stages.py
    5  logit_bias: added                              token_stages.py
    6  user-defined logits processors                 logits_processors.py
    7  penalties: repetition, frequency, presence     penalties.py
    8  sampling: temperature, min_p, top_k, top_p,
       Gumbel noise; greedy takes the largest         kernels: sample_tokens

Masked means -inf: only a user's processor can revive such a token. A row with all tokens masked is
an error of its request. Stages 1 to 7 share one interface and are in one list (make_stages in
token_stages.py). They keep state by slot and change rows in place. A stage that no request of the
step uses is not called; if no request uses any, a step pays one comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from ...ipc.errors import InvalidParameterError
from ...ipc.params import SamplingParams
from ...ipc.step_messages import NewRequestData, RowError, RowRefusal
from ..input_batch import InputBatch
from .change_list import ChangeList

PROCESSORS = "logits_processors"
MASKS = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")


class LogitsStage(Protocol):
    """A stage. `parameter` names what it applies.

    `enter` gives it a request's parameters, kept by slot until `leave`.

    Between two calls of `apply` a slot may gain no token, one or several; see batch.token_ids and
    batch.num_tokens. A preempted request enters again with its output so far.
    """

    parameter: str

    def enter(self, request: NewRequestData) -> bool:
        """Returns whether this request uses the stage.

        Raises InvalidParameterError for an impossible request; this fails only the request.
        """
        ...

    def leave(self, slot: int) -> None:
        """The request left the slot. Called only for slots that use the stage."""

    def apply(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> Mapping[int, RowError] | None:
        """Changes only `rows` [R] of logits [B, vocab_size] f32, in place; `slots` [R] are theirs.

        Returns errors of single requests, by row, or None.
        """

    def describe(
        self, changes: ChangeList, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> Mapping[int, RowError] | None:
        """Notes what apply would change. A user's processors cannot: see are_described."""


class LogitsStages:
    """All stages in order, and the table of which slot uses which.

    `are_asked_for`: whether a request's parameters may ask for any; others enter none.
    """

    def __init__(
        self,
        stages: Sequence[LogitsStage] = (),
        max_num_seqs: int = 0,
        are_asked_for: Callable[[SamplingParams], bool] = lambda params: True,
    ):
        self.stages = list(stages)
        self.are_asked_for = are_asked_for
        self._wants = np.zeros((len(self.stages), max_num_seqs), bool)
        self.num_slots = 0  # that use any stage

    def enter(self, request: NewRequestData) -> None:
        """Raises InvalidParameterError; the slot then uses no stage."""
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
        """May be called for free slots, too."""
        if self.num_slots == 0 and not self._wants[:, slot].any():
            return
        for index in np.flatnonzero(self._wants[:, slot]):
            self.stages[index].leave(slot)
        self._wants[:, slot] = False
        self._count()

    def are_wanted_by(self, slots: list[int]) -> bool:
        """Whether any of them uses a stage."""
        return self.num_slots > 0 and bool(self._wants[:, slots].any())

    def _count(self) -> None:
        self.num_slots = int(self._wants.any(axis=0).sum())

    def __call__(
        self, logits: torch.Tensor, slots: np.ndarray, batch: InputBatch
    ) -> dict[int, RowError]:
        """Changes logits [R, vocab_size] f32, all finite, in place; slots [R].

        Returns errors by row; the values of those rows are undefined.
        """
        if not self.num_slots:
            return {}
        wants = self._wants[:, slots]
        changed = wants.any(axis=0)
        if not changed.any():
            return {}
        errors: dict[int, RowError] = {}
        for stage, mine in zip(self.stages, wants):
            rows = np.flatnonzero(mine)
            if len(rows):
                errors |= stage.apply(logits, rows, slots[rows], batch) or {}
        largest = logits.amax(-1).numpy(force=True)  # NaN where any is
        rows = np.flatnonzero(changed)
        return self.errors_of(rows, largest[rows], slots) | errors

    def are_described(self, slots: np.ndarray) -> bool:
        """Whether `describe` tells all that the stages do to the rows of `slots` [R]."""
        return not any(
            stage.parameter == PROCESSORS and mine.any()
            for stage, mine in zip(self.stages, self._wants[:, slots])
        )

    def describe(
        self, changes: ChangeList, slots: np.ndarray, batch: InputBatch
    ) -> dict[int, RowError]:
        """Notes what a call would change; returns errors by row."""
        errors: dict[int, RowError] = {}
        for stage, mine in zip(self.stages, self._wants[:, slots]):
            rows = np.flatnonzero(mine)
            if len(rows):
                errors |= stage.describe(changes, rows, slots[rows], batch) or {}
        return errors

    def errors_of(
        self, rows: np.ndarray, largest: np.ndarray, slots: np.ndarray
    ) -> dict[int, RowError]:
        """By row: the errors of changed rows [M] of `slots` [R] whose largest logit [M] f32, NaN
        where any is, shows that no token is left.
        """
        errors: dict[int, RowError] = {}
        for row, value in zip(rows.tolist(), largest.tolist()):
            if not np.isfinite(value):
                wants = self._wants[:, slots[row]]
                used = [stage.parameter for stage, is_used in zip(self.stages, wants) if is_used]
                errors[row] = row_error(used, is_masked=value == -np.inf)
        return errors


def row_error(used: Sequence[str], is_masked: bool) -> RowError:
    """The error of a row whose logits, after the stages of the parameters `used`, are all masked or
    not finite. Whether a logits processor is the reason cannot be known.
    """
    masks = [name for name in used if name in MASKS or name == PROCESSORS]
    if is_masked and masks:
        listed = ", ".join(masks)
        problem = (
            f"no token is left: {listed} mask every token" if masks[1:] else "masks every token"
        )
        parameter = masks[0]
    else:
        parameter = next((name for name in reversed(used) if name not in MASKS), used[-1])
        problem = "makes the request's logits NaN or infinite"
    if PROCESSORS in used:
        return f"{parameter}: {problem} ({PROCESSORS} are in use)"
    return RowRefusal(parameter, problem)
