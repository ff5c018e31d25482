"""Drafts where a model has stages: the last stage drafts at the end of a step what the next step of
the same requests verifies, since the first stage begins that step with the drafts.

Must not know: processes, how drafts are found, what carries them to the other stages.

    first stage   [ step 1 ][ step 2 ][ step 3 ]
    last stage              [ step 1, drafts ][ step 2, drafts ][ …
    tokens and drafts                 of 1 ▲ in the message that begins step 3
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ....ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ...input_batch import InputBatch
from .proposers import NOTHING
from .speculative_step import VerifyingPass
from .verification import Speculation, place_drafts


class KeptDrafts:
    """The drafts that the next step of each slot may verify: those that all stages know. Every rank
    of every stage keeps the same ones.
    """

    def __init__(self, batch: InputBatch, max_num_tokens: int, max_num_rows: int):
        """Both limits are those of a step: its tokens, and its rows of logits."""
        self._batch = batch
        self._max_num_tokens, self._max_num_rows = max_num_tokens, max_num_rows
        # by slot: the request's number, its known tokens, and the drafts that follow them
        self._drafts: dict[int, tuple[int, int, np.ndarray]] = {}

    def keep(self, slots: Sequence[int], drafts: Sequence[np.ndarray]) -> None:
        """Keeps drafts that follow the known tokens of slots; empty ones are none."""
        batch = self._batch
        for slot, draft in zip(slots, drafts, strict=True):
            if len(draft):
                known = int(batch.entries[slot]), int(batch.num_tokens[slot])
                self._drafts[slot] = *known, draft

    def columns(self, slots: Sequence[int]) -> tuple[list[int], list[int]]:
        """How many drafts each of `slots` has, and all of them."""
        drafts = [self._of(slot) for slot in slots]
        return [len(draft) for draft in drafts], [int(x) for draft in drafts for x in draft]

    def take(self, step: SchedulerOutput) -> list[np.ndarray]:
        """The drafts that this step verifies, of each row: as many as it has lookahead tokens and
        room for. The others are dropped.
        """
        limits = step.num_lookahead_tokens or [0] * len(step.slots)
        room = min(
            self._max_num_tokens - step.total_num_scheduled_tokens,
            self._max_num_rows - len(step.slots),
        )
        taken = []
        for slot, limit in zip(step.slots, limits, strict=True):
            draft = self._of(slot)[: max(0, min(limit, room))]
            self._drafts.pop(slot, None)
            room -= len(draft)
            taken.append(draft)
        return taken

    def _of(self, slot: int) -> np.ndarray:
        """The slot's drafts, if they are of its request and follow its known tokens."""
        entry, start, draft = self._drafts.get(slot, (-1, -1, NOTHING))
        batch = self._batch
        is_its_own = entry == batch.entries[slot] and start == batch.num_tokens[slot]
        return draft if is_its_own else NOTHING

    def placed(self, step: SchedulerOutput) -> SchedulerOutput:
        """The step that also computes the drafts, which stand behind the known tokens then."""
        if not any(step.num_lookahead_tokens):
            return step
        return place_drafts(self._batch, step, self.take(step))


class LastStageStep:
    """A StepRunner of the last stage: verifies the drafts that are kept, and drafts for the next
    step of the same rows.
    """

    def __init__(
        self,
        batch: InputBatch,
        speculation: Speculation,
        verify: VerifyingPass,
        kept: KeptDrafts,
    ):
        self._batch, self._speculation, self._verify, self._kept = batch, speculation, verify, kept
        self._without = set[int]()  # slots whose next pass is to have no drafts

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See StepRunner."""
        step, drafts = scheduler_output, self._kept.take(scheduler_output)
        # steps of other rows may have run since these rows' last step
        self._without.difference_update(request.slot for request in step.new_requests)
        self._speculation.begin(not self._without.issuperset(step.slots))
        if any(map(len, drafts)):
            result = self._verify(step, drafts)
        else:
            plain = msgspec.structs.replace(step, num_lookahead_tokens=[])
            result = self._verify.without_drafts(plain)
            if step.num_lookahead_tokens:
                result = msgspec.structs.replace(result, num_ahead=[0] * len(step.slots))
        # several ranks have no clock: passes take what was measured
        self._speculation.learn_time(step, 1, result.num_drafted, 0.0)
        self._draft_next(step, result)
        return result

    def _draft_next(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Drafts what may follow the tokens that were sampled, within the blocks of each row."""
        slots = [
            slot
            for slot, count in zip(step.slots, result.num_sampled)
            if count and slot not in result.errors
        ]
        if not slots:
            return
        known = self._batch.num_tokens[slots]
        most = np.full(len(slots), self._speculation.most)
        if self._speculation.drafter.uses_blocks:
            most = np.clip(self._batch.num_blocks[slots] * self._batch.block_size - known, 0, most)
        following = SchedulerOutput(
            step=step.step,
            slots=slots,
            num_scheduled_tokens=[1] * len(slots),
            num_computed_tokens=(known - 1).tolist(),
            num_lookahead_tokens=most.tolist(),
        )
        counts = self._speculation.choose(following)
        if self._speculation.drafts_decodes:
            self._without.difference_update(slots)
        else:
            self._without.update(slots)
        drafts, _ = self._speculation.draft(following, counts)
        self._verify.drop_forbidden(slots, drafts)
        self._kept.keep(slots, drafts)
