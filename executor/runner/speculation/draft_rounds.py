"""Several rounds of drafts and their verification in one native call.

Must not know: how many drafts are worth their cost, the scheduler, files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ....ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ....kernels.cpu.native.drafting import Drafting
from ...sampling.sampler import NOT_FINITE, draw_parameters, draws
from ..input_batch import InputBatch
from ..step_inputs import StepInputs


class RoundsOutput(NamedTuple):
    """The output of all rounds; of each pass in turn the slots, and how many drafts they had and
    were accepted, as DraftDepth learns them.
    """

    result: ModelRunnerOutput
    slots: list[int]
    num_drafted: Sequence[float]
    num_accepted: list[int]


# Of a request in a round: how many drafts it had; what was drawn after its last token and each
# draft, whether these are finite, and how many drafts were accepted.
Verified = tuple[int, list[int], list[bool], int]


def collect_rounds(
    batch: InputBatch, slots: np.ndarray, order: np.ndarray, rounds: Iterable[Iterable[Verified]]
) -> RoundsOutput:
    """Appends what was drawn for `slots` [B], which are those of the step in this order [B], as
    passes that verify drafts do. A row has no more rounds after logits that are not finite.
    """
    by_slot = slots.tolist()
    tokens: list[list[int]] = [[] for _ in by_slot]
    num_ahead, errors = [-1] * len(by_slot), {}
    in_turn: list[int] = []
    drafted: list[int] = []
    accepted: list[int] = []
    for of_requests in rounds:
        for index, (num_drafted, drawn, is_finite, count) in enumerate(of_requests):
            slot = by_slot[index]
            if slot in errors:
                continue
            if not is_finite[count]:
                errors[slot] = NOT_FINITE
            tokens[index] += drawn[: count + is_finite[count]]
            num_ahead[index] += 1 + count
            in_turn.append(slot)
            drafted.append(num_drafted)
            accepted.append(count)
    rows = np.argsort(order).tolist()
    for index, of_slot in enumerate(tokens):
        batch.append_runs(slots[index : index + 1], np.array([of_slot], np.int64))
    result = ModelRunnerOutput(
        [len(tokens[index]) for index in rows],
        [token_id for index in rows for token_id in tokens[index]],
        errors=errors,
        num_ahead=[num_ahead[index] for index in rows],
        num_drafted=[count for count in drafted if count],
        num_accepted=[count for count, of_row in zip(accepted, drafted) if of_row],
    )
    return RoundsOutput(result, in_turn, drafted, accepted)


class Rounds(Protocol):
    """Several rounds in one call. is_ragged: whether rows may have unequal numbers of drafts."""

    is_ragged: bool

    def count(self, step: SchedulerOutput, counts: Sequence[int], num_passes: int) -> int:
        """How many rounds run() can take of a step whose rows are to have `counts` drafts; 0: none.

        num_passes: the most passes of the model.
        """
        ...

    def run(self, step: SchedulerOutput, counts: Sequence[int], num_rounds: int) -> RoundsOutput:
        """Runs so many rounds with at most `counts` drafts of each row."""
        ...


class PassDrafter(Protocol):
    """Drafts by passes of its own. max_model_len: the longest text that it continues."""

    max_model_len: int

    def is_ready(self, slots: np.ndarray) -> np.ndarray:
        """slots [B] -> [B] bool: whether first_inputs() can follow."""
        ...

    def first_inputs(self, slots: np.ndarray, num_ahead: int) -> StepInputs:
        """The inputs of the pass that gives the first draft of each of `slots` [B]. Block tables
        have room for num_ahead more tokens, the draft among them.
        """
        ...

    def end_rounds(self, slots: np.ndarray, num_drafts: int, num_accepted: np.ndarray) -> None:
        """After rounds of `slots` [B], whose tokens are appended: num_accepted [B] of the last
        one's drafts.
        """
        ...


class DraftRounds:
    """For steps of decodes whose tokens depend on nothing but logits and parameters, and whose rows
    have equally many drafts.
    """

    is_ragged = False

    def __init__(self, drafting: Drafting, drafter: PassDrafter, batch: InputBatch):
        self._drafting, self._drafter, self._batch = drafting, drafter, batch

    def count(self, step: SchedulerOutput, counts: Sequence[int], num_passes: int) -> int:
        num_drafts, slots = counts[0], step.slots
        if (
            not num_drafts
            or any(count != num_drafts for count in counts)
            or step.num_scheduled_tokens.count(1) != len(slots)
            or not self._drafting.fits(len(slots), num_drafts)
        ):
            return 0
        known = self._batch.num_tokens[slots]
        room = 1 + min(step.num_lookahead_tokens)
        room = min(room, self._drafter.max_model_len - int(known.max()))
        is_last = (known - 1).tolist() == step.num_computed_tokens
        is_ready = is_last and bool(self._drafter.is_ready(np.array(slots)).all())
        return min(num_passes, room // (num_drafts + 1)) if is_ready else 0

    def run(self, step: SchedulerOutput, counts: Sequence[int], num_rounds: int) -> RoundsOutput:
        batch, drafter, num_drafts = self._batch, self._drafter, counts[0]
        num_ahead = num_rounds * (num_drafts + 1)
        inputs = drafter.first_inputs(np.array(step.slots, np.int64), num_ahead)
        slots, order = inputs.slots, inputs.order
        draw = None
        if draws(batch, slots):
            known = torch.from_numpy(batch.num_tokens[slots])
            draw = (*draw_parameters(batch, slots, torch.device("cpu")), known)
        drawn, is_finite, accepted = (
            result.numpy()
            for result in self._drafting(
                inputs.token_ids,
                inputs.positions,
                inputs.metadata,
                inputs.logits_indices,
                num_rounds,
                num_drafts,
                draw,
            )
        )
        output = collect_rounds(
            batch,
            slots,
            order,
            (
                zip([num_drafts] * len(slots), *(values.tolist() for values in of_round))
                for of_round in zip(drawn, is_finite, accepted)
            ),
        )
        drafter.end_rounds(slots, num_drafts, accepted[-1])
        return output
