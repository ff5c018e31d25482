"""Steps that ranks run, and steps of several passes, which each go round the stages.

Must not know: processes, messages, what a rank does.

A stage needs the tokens of a pass before it begins the next one of the same rows, so each pass is
begun here once the last stage has sampled, and passes of other steps run meanwhile:

    first stage   [ A, pass 1 ][ B, pass 1 ][ A, pass 2 ][ B, pass 2 ]
    last stage                 [ A, pass 1 ][ B, pass 1 ][ A, pass 2 ][ …

A request of A may leave its slot with step B. Then the later passes of A leave it out, and say how
many of its tokens are computed (ModelRunnerOutput.num_ahead).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from ...ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ..runner.merged_outputs import merge_outputs

Take = Callable[[], ModelRunnerOutput]  # waits for the output of a step
Then = Callable[[Take], Any]


class PendingRanks:
    """A step that all ranks run, or blocks that they move."""

    def __init__(self, finish_oldest: Callable[[], None], take: Callable[[], Any]):
        """take: waits for the replies, and returns the result."""
        self._finish_oldest, self.take = finish_oldest, take
        self.output: Future[Any] = Future()

    def result(self) -> ModelRunnerOutput:
        """Waits for this step and those before it."""
        while not self.output.done():
            self._finish_oldest()
        return self.output.result()


class Submit(Protocol):
    """Begins a step on all ranks; `then` is called as the oldest one that runs has ended."""

    def __call__(self, step: SchedulerOutput, then: Then) -> PendingRanks: ...


class Rounds:
    """The steps of several passes that run."""

    def __init__(self, submit: Submit, finish_oldest: Callable[[], None]):
        """See PendingRanks for finish_oldest."""
        self._submit, self._finish_oldest = submit, finish_oldest
        self._running: list[PassesOfStep] = []

    def submit(self, step: SchedulerOutput) -> PendingRanks:
        """Begins a step, which may have lookahead tokens."""
        for passes in self._running:
            passes.leave_out(step.freed_slots)
        if not any(step.num_lookahead_tokens):
            return self._submit(step, _take)
        passes = PassesOfStep(step)
        whole = PendingRanks(self._finish_oldest, passes.output)

        def then(take: Take) -> None:
            try:
                following = passes.next(take())
                if following is not None:
                    self._submit(following, then)
                    return
                self._running.remove(passes)
                whole.output.set_result(passes.output())
            except Exception as error:
                whole.output.set_exception(error)
                raise

        self._running.append(passes)
        self._submit(passes.first(), then)
        return whole


def _take(take: Take) -> ModelRunnerOutput:
    return take()


class PassesOfStep:
    """The passes of a step with lookahead tokens: the first one, then one for each of them."""

    def __init__(self, step: SchedulerOutput):
        self._step = step
        self._rows = list(range(len(step.slots)))  # of the pass that runs
        self._num_left = list(step.num_lookahead_tokens)
        # of each row, how many tokens are computed after the passes so far
        self._ends = [
            computed + count
            for computed, count in zip(step.num_computed_tokens, step.num_scheduled_tokens)
        ]
        self._left_out: set[int] = set()  # slots
        self._results: list[tuple[list[int], ModelRunnerOutput]] = []

    def first(self) -> SchedulerOutput:
        """The first pass, with all that the step changes."""
        return msgspec.structs.replace(self._step, num_lookahead_tokens=[])

    def leave_out(self, slots: Iterable[int]) -> None:
        """The requests of these slots leave them."""
        self._left_out.update(slots)

    def next(self, output: ModelRunnerOutput) -> SchedulerOutput | None:
        """The pass after the one with this output, if any."""
        step, slots = self._step, self._step.slots
        none_ahead = [0] * len(self._rows)
        self._results.append(
            (self._rows, msgspec.structs.replace(output, num_ahead=none_ahead)),
        )
        self._rows = [
            row
            for row, count in zip(self._rows, output.num_sampled, strict=True)
            if count
            and self._num_left[row]
            and slots[row] not in output.errors
            and slots[row] not in self._left_out
        ]
        if not self._rows:
            return None
        computed = [self._ends[row] for row in self._rows]
        for row in self._rows:
            self._ends[row] += 1
            self._num_left[row] -= 1
        return SchedulerOutput(
            step=step.step,
            slots=[slots[row] for row in self._rows],
            num_scheduled_tokens=[1] * len(self._rows),
            num_computed_tokens=computed,
            # a state is copied in the pass that reaches the position
            state_saves=[save for save in step.state_saves if save[0] not in self._left_out],
        )

    def output(self) -> ModelRunnerOutput:
        """The output of the step, after its last pass."""
        return merge_outputs(self._step.slots, self._results)
