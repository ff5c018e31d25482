"""Steps that draft, and passes that a drafter sees.

Must not know: how drafts are found, the scheduler, how a pass is run.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from ....ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ...input_batch import InputBatch
from ...model import Taps
from ..bursts import Bursts
from ..merged_outputs import merge_outputs
from ..plain_step import PlainStep, StepRunner
from ..step_inputs import StepInputs
from .verification import Speculation, first_rows, logits_rows, place_drafts


class ObservedStep(PlainStep):
    """A PlainStep whose passes the drafter sees once their tokens are drawn. taps: of the model."""

    def __init__(self, *parts: Any, speculation: Speculation, taps: Taps | None):
        super().__init__(*parts)
        self._speculation, self._taps = speculation, taps

    def end(self, inputs: StepInputs, results: tuple[torch.Tensor, ...]) -> ModelRunnerOutput:
        """See OnePass."""
        output = super().end(inputs, results)
        self.observe(inputs, results[0])
        return output

    def observe(self, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """Shows a pass whose tokens are drawn to the drafter. hidden [T, hidden_size]"""
        taps = self._taps
        self._speculation.observe(inputs, hidden if taps is None else taps.state[: len(hidden)])


class VerifyingPass:
    """A pass of the model over each row's last known token and its drafts."""

    def __init__(self, batch: InputBatch, speculation: Speculation, one_pass: ObservedStep):
        self._batch, self._speculation, self._pass = batch, speculation, one_pass

    def without_drafts(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """A pass of rows that have no drafts."""
        return self._pass.execute_model(step)

    def drop_forbidden(self, slots: list[int], drafts: list[np.ndarray]) -> None:
        """Drops drafts from the first one on that the row's grammar forbids."""
        grammars = self._pass.special.grammars
        if grammars is None or not grammars.has_any:
            return
        for row, (slot, draft) in enumerate(zip(slots, drafts)):
            if len(draft):
                drafts[row] = draft[: grammars.num_allowed(slot, draft, self._batch)]

    def __call__(self, step: SchedulerOutput, drafts: list[np.ndarray]) -> ModelRunnerOutput:
        """Computes each row's last known token and its drafts, and samples what they allow."""
        batch, speculation, special = self._batch, self._speculation, self._pass.special
        inputs = self._pass.make_inputs(place_drafts(batch, step, drafts))
        special.begin(inputs)
        if special.grammars is not None:
            special.grammars.look_ahead(step.slots, drafts)
        hidden, *of_logits = self._pass.forward(
            inputs.token_ids, inputs.positions, inputs.metadata, logits_rows(inputs, drafts)
        )
        is_plain = not (batch.prompt_logprobs_slots or batch.pooling or batch.refusals)
        if is_plain and len(inputs.sampled_slots) and not batch.stages.are_wanted_by(step.slots):
            result = speculation.verify_at_once(drafts, inputs, of_logits, special.sampler)
        else:
            result = self._verify_in_turn(inputs, drafts, hidden, of_logits)
        self._pass.observe(inputs, hidden)
        return result

    def _verify_in_turn(
        self,
        inputs: StepInputs,
        drafts: list[np.ndarray],
        hidden: torch.Tensor,
        of_logits: list[torch.Tensor],
    ) -> ModelRunnerOutput:
        """Samples position by position, as rows with logits stages need it."""
        special = self._pass.special
        lengths = np.array([len(drafts[i]) for i in inputs.order[inputs.sampled_rows]], np.int64)
        first = torch.from_numpy(first_rows(lengths))
        drafted = frozenset(inputs.sampled_slots[lengths > 0].tolist())
        firsts = (values[first] for values in of_logits)
        result = special.sample(inputs, hidden, *firsts, drafted=drafted)
        return self._speculation.verify(drafts, inputs, of_logits, result, special.sampler)


class SpeculativeStep:
    """A StepRunner: drafts for rows with lookahead tokens, and verifies them in passes of the
    model. `step`: runs steps without lookahead tokens; `bursts`: several passes in one call, where
    no drafts are worth their cost.
    """

    def __init__(
        self,
        batch: InputBatch,
        speculation: Speculation,
        bursts: Bursts | None,
        verify: VerifyingPass,
        step: StepRunner,
    ):
        self._batch, self._speculation, self._bursts = batch, speculation, bursts
        self._verify, self._step = verify, step

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """See StepRunner. Takes at most num_passes passes of the model."""
        if not any(scheduler_output.num_lookahead_tokens):
            return self._step.execute_model(scheduler_output)
        slots, room = scheduler_output.slots, scheduler_output.num_lookahead_tokens
        step, rows, num_sampled = scheduler_output, list(range(len(slots))), [0] * len(slots)
        num_left, results = scheduler_output.num_passes, []
        while True:
            start = self._speculation.clock()
            count, result = self._take_passes(step, num_left)
            seconds = self._speculation.clock() - start
            self._speculation.learn_time(step, count, result.num_drafted, seconds)
            num_left -= count
            results.append((rows, result))
            for row, more in zip(rows, result.num_sampled):
                num_sampled[row] += more
            rows = [
                row
                for row in rows
                if num_sampled[row] <= room[row] and slots[row] not in result.errors
            ]
            # a state that drafts follow is behind the tokens: the next step computes them again
            is_behind = self._speculation.has_states and bool(result.num_drafted)
            if not rows or num_left <= 0 or is_behind:
                return results[0][1] if len(results) == 1 else merge_outputs(slots, results)
            left = [slots[row] for row in rows]
            step = SchedulerOutput(
                step=scheduler_output.step,
                slots=left,
                num_scheduled_tokens=[1] * len(rows),
                num_computed_tokens=(self._batch.num_tokens[left] - 1).tolist(),
                new_block_ids=[],
                num_lookahead_tokens=[room[row] - num_sampled[row] for row in rows],
                num_passes=num_left,
            )

    def _take_passes(self, step: SchedulerOutput, most: int) -> tuple[int, ModelRunnerOutput]:
        """Takes a pass of the model with drafts, or, where there are none, up to `most` passes in
        one call. Returns how many.
        """
        counts = self._speculation.choose(step)
        drafts, at_once = self._speculation.draft(step, counts)
        self._verify.drop_forbidden(step.slots, drafts)
        if any(map(len, drafts)):
            return 1, self._verify(step, drafts)
        count = min(most, at_once, 1 + min(step.num_lookahead_tokens))
        if count > 1 and self._bursts is not None:
            ahead = [count - 1] * len(step.slots)
            burst = msgspec.structs.replace(step, num_lookahead_tokens=ahead)
            if self._bursts.fits(burst):
                return count, msgspec.structs.replace(self._bursts.run(burst), num_ahead=ahead)
        result = self._verify.without_drafts(msgspec.structs.replace(step, num_lookahead_tokens=[]))
        return 1, msgspec.structs.replace(result, num_ahead=[0] * len(step.slots))
