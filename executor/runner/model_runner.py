"""Runs one step on one rank: from a SchedulerOutput to sampled tokens.

Must not know: requests beyond their slot, why something was scheduled, other processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from ...ipc.step_messages import ModelRunnerOutput, RowError, SchedulerOutput
from ...kernels.registry import OpTable
from ..device import CopyToHost, SecondStream, wake_threads
from ..model import Model, uncounted
from ..plugins import plugin_failure
from ..pooling.pooler import Pooler
from ..program.step_program import run_op_by_op
from ..sampling.grammar import Grammars
from ..sampling.prompt_logprobs import PromptScorer
from ..sampling.sampler import Sampler
from .block_mover import BlockMover
from .bursts import Bursts
from .cuda_graphs import GraphedStep
from .device_inputs import DeviceInputMaker, DeviceTables
from .input_batch import InputBatch
from .launched_steps import HostStep, PendingStep, StepLauncher
from .sampled_elsewhere import SampledElsewhere
from .speculation.verification import Speculation, first_rows, logits_rows
from .step_inputs import StepInputMaker, StepInputs, dummy_step
from .step_outputs import insert_forced, merge_outputs

if TYPE_CHECKING:
    from ..draft import Draft

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the slot tables; uses the worker's model and operations."""

    def __init__(
        self,
        model: Model,
        ops: OpTable,
        batch: InputBatch,
        block_size: int,
        device: torch.device,
        grammars: Grammars | None = None,
    ):
        self.model: Any = model
        self.ops = ops
        # set by the worker: runs what run_op_by_op does in one call
        self.program: Callable | None = None
        self.bursts: Bursts | None = None  # set by the worker: runs several steps in one call
        self.speculation: Speculation | None = None  # set by the worker of an engine that drafts
        self.draft: Draft | None = None  # set by the worker of an engine with a draft model
        self.is_stage = False  # set by the worker of one
        # set by the worker of a stage before the last one
        self.elsewhere: SampledElsewhere | None = None
        self.batch = batch
        self.device = device
        self.block_size = block_size
        self.host_inputs = StepInputMaker(batch, block_size, model.num_token_types)
        self.make_inputs: Callable[[SchedulerOutput], StepInputs] = self.host_inputs
        self.tables: DeviceTables | None = None
        self.launcher: StepLauncher | None = None  # of steps whose tokens stay on the device
        self._host_step: HostStep | None = None  # the previous step, if the host samples it
        self.grammars = grammars  # one of the batch's stages, if any
        self.sampler = Sampler(ops)
        self.block_mover: BlockMover | None = None  # set by the worker when there is a cache
        self.pooler: Pooler | None = None  # set by the worker if the model can pool
        self.prompt_scorer = PromptScorer(logits_of(model), ops, model.config.vocab_size)
        self._use_adapters(model)
        if device.type != "cpu":
            self.keep_state_on_device(SecondStream(device))

    def keep_state_on_device(self, copy_to_host: CopyToHost) -> None:
        """Keeps tables and inputs on the device from now on; tokens return through `copy_to_host`.

        Call it before the first request.
        """
        self.tables = DeviceTables(self.batch, self.ops, self.device)
        self.make_inputs = inputs = DeviceInputMaker(
            self.tables, self.block_size, self.ops, self._graph_buffers
        )
        self.launcher = StepLauncher(
            self.batch, self.ops, self.tables, inputs, self._forward, copy_to_host
        )
        self.launcher.warm_up()

    def _graph_buffers(self, count: int) -> tuple[torch.Tensor, ...] | None:
        return self.program.buffers(count) if isinstance(self.program, GraphedStep) else None

    def use_model(self, model: Model | None) -> None:
        """Switches to another model of the same shape, or to none: then no step may follow."""
        self.model, self.program, self.bursts = model, None, None
        self.prompt_scorer.compute_logits = logits_of(model)
        if model is not None:
            self._use_adapters(model)
        if self.pooler is not None:
            self.pooler.use_model(model)

    def attention_layers(self) -> list[Any]:
        """All layers that have a part of each block of the KV cache."""
        layers = self.model.attention_layers()
        return layers if self.draft is None else [*layers, *self.draft.attention_layers()]

    def _use_adapters(self, model: Model) -> None:
        if self.batch.loras is not None:
            self.batch.loras.use_model(model)
            self.prompt_scorer.adapter_rows = model.adapter_rows

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the scheduled tokens and samples the rows that are complete.

        Logits that are not finite are their own row's error. An exception from a plugin's code ends
        the requests of its step, except on a GPU, whose state is unknown then. A stage before the
        last one samples no rows; see SampledElsewhere.
        """
        if self.launcher is not None:
            return self.launch_model(scheduler_output).result()
        wake_threads()
        self._apply_differences(scheduler_output)
        if self.elsewhere is not None:
            return self._begin_elsewhere(scheduler_output, self.elsewhere)
        if not scheduler_output.slots:
            return ModelRunnerOutput([], [])
        try:
            if self.speculation is not None and any(scheduler_output.num_lookahead_tokens):
                return self._speculate(scheduler_output, self.speculation)
            if scheduler_output.num_lookahead_tokens and (
                bursts := self._bursts_for(scheduler_output)
            ):
                return bursts.run(scheduler_output)
            return self._end(scheduler_output, *self._begin(scheduler_output))
        except Exception as error:
            slots, failure = scheduler_output.slots, plugin_failure(error)
            if failure is None or self.device.type != "cpu":
                raise
            logger.error("%s", failure, exc_info=error)
            return ModelRunnerOutput([0] * len(slots), [], errors=dict.fromkeys(slots, failure))

    def _bursts_for(self, scheduler_output: SchedulerOutput) -> Bursts | None:
        """The bursts that run several steps of this one in a single call, if they support it."""
        bursts = self.bursts
        if bursts is None or self.batch.refusals or self._needs_host(scheduler_output.slots):
            return None
        return bursts if bursts.fits(scheduler_output) else None

    def _begin_elsewhere(
        self, scheduler_output: SchedulerOutput, elsewhere: SampledElsewhere
    ) -> ModelRunnerOutput:
        """A step of a stage before the last one, whose differences are in the tables."""
        elsewhere.expect(scheduler_output.slots)
        if scheduler_output.slots:
            self._begin(scheduler_output)
        return ModelRunnerOutput([0] * len(scheduler_output.slots), [])

    @torch.inference_mode()
    def launch_model(self, scheduler_output: SchedulerOutput) -> PendingStep | HostStep:
        """As execute_model, for state on the device, but returns without waiting.

        `result()` of the returned object waits, in this same thread. A step may be launched before
        the previous ones have finished.
        """
        tables, launcher = self.tables, self.launcher
        assert tables is not None and launcher is not None  # keep_state_on_device set both
        # it samples with the tables before this step changes them
        if self._host_step is not None:
            self._host_step.result()
            self._host_step = None
        self._apply_differences(scheduler_output)
        tables.note_differences(scheduler_output)
        if self.elsewhere is not None:
            begun_elsewhere = self._begin_elsewhere(scheduler_output, self.elsewhere)
            return HostStep(lambda: begun_elsewhere)
        if scheduler_output.slots and not self._needs_host(scheduler_output.slots):
            return launcher.launch(scheduler_output)
        # Plain order: all previous steps are finished first, and this one before the next is
        # launched. The model runs meanwhile.
        launcher.finish_all()
        begun = self._begin(scheduler_output) if scheduler_output.slots else None

        @torch.inference_mode()
        def finish() -> ModelRunnerOutput:
            return (
                ModelRunnerOutput([], []) if begun is None else self._end(scheduler_output, *begun)
            )

        self._host_step = HostStep(finish)
        return self._host_step

    def _needs_host(self, slots: list[int]) -> bool:
        """Whether a row of the step needs a logits stage or log-probabilities, which the host
        computes.
        """
        batch = self.batch
        requested = batch.logprobs_slots, batch.prompt_logprobs_slots
        return (
            any(some and not some.isdisjoint(slots) for some in requested)
            or batch.stages.are_wanted_by(slots)
            or (bool(batch.pooling) and not batch.pooling.keys().isdisjoint(slots))
        )

    def _end(
        self, scheduler_output: SchedulerOutput, inputs: StepInputs, *results: torch.Tensor
    ) -> ModelRunnerOutput:
        result = self._sampled(inputs, *results)
        return (
            self._look_ahead(scheduler_output, result)
            if any(scheduler_output.num_lookahead_tokens)
            else result
        )

    def _speculate(
        self, scheduler_output: SchedulerOutput, speculation: Speculation
    ) -> ModelRunnerOutput:
        """Takes the passes of a step that may verify drafts. Where none are worth their cost,
        several passes are one call.
        """
        slots, room = scheduler_output.slots, scheduler_output.num_lookahead_tokens
        step, rows, num_sampled = scheduler_output, list(range(len(slots))), [0] * len(slots)
        num_left, results = scheduler_output.num_passes, []
        speculation.drafter.connect(self.bursts)
        while True:
            in_rounds = self.bursts is not None and not (
                self.batch.refusals or self._needs_host(step.slots)
            )
            counts = speculation.choose(step, in_rounds)
            taken = speculation.run_rounds(step, counts, num_left) if in_rounds else None
            count, result = taken or self._take_passes(step, speculation, counts, num_left)
            num_left -= count
            results.append((rows, result))
            for row, more in zip(rows, result.num_sampled):
                num_sampled[row] += more
            rows = [
                row
                for row in rows
                if num_sampled[row] <= room[row] and slots[row] not in result.errors
            ]
            if not rows or num_left <= 0:
                return results[0][1] if len(results) == 1 else merge_outputs(slots, results)
            left = [slots[row] for row in rows]
            step = SchedulerOutput(
                scheduler_output.step,
                left,
                [1] * len(rows),
                (self.batch.num_tokens[left] - 1).tolist(),
                [],
                num_lookahead_tokens=[room[row] - num_sampled[row] for row in rows],
                num_passes=num_left,
            )

    def _take_passes(
        self, step: SchedulerOutput, speculation: Speculation, counts: list[int], most: int
    ) -> tuple[int, ModelRunnerOutput]:
        """Takes a pass of the model with at most `counts` drafts of each row, or, where there are
        none, up to `most` in one call. Returns how many.
        """
        drafts, at_once = speculation.draft(step, counts)
        self._cut_by_grammars(step.slots, drafts)
        if any(map(len, drafts)):
            return 1, self._verify(step, speculation, drafts)
        count = min(most, at_once, 1 + min(step.num_lookahead_tokens))
        if count > 1:
            ahead = [count - 1] * len(step.slots)
            burst = msgspec.structs.replace(step, num_lookahead_tokens=ahead)
            if bursts := self._bursts_for(burst):
                return count, msgspec.structs.replace(bursts.run(burst), num_ahead=ahead)
        return 1, self._without_drafts(step)

    def _cut_by_grammars(self, slots: list[int], drafts: list[np.ndarray]) -> None:
        """Drops drafts from the first one on that the row's grammar forbids."""
        if (grammars := self.grammars) is None or not grammars.has_any:
            return
        for row, (slot, draft) in enumerate(zip(slots, drafts)):
            if len(draft):
                drafts[row] = draft[: grammars.num_allowed(slot, draft, self.batch)]

    def _without_drafts(self, step: SchedulerOutput) -> ModelRunnerOutput:
        result = self._compute(msgspec.structs.replace(step, num_lookahead_tokens=[]))
        return msgspec.structs.replace(result, num_ahead=[0] * len(step.slots))

    def _verify(
        self, step: SchedulerOutput, speculation: Speculation, drafts: list[np.ndarray]
    ) -> ModelRunnerOutput:
        """Computes each row's last known token and its drafts, and samples what they allow."""
        batch = self.batch
        inputs = self.make_inputs(speculation.place(step, drafts))
        if self.grammars is not None:
            self.grammars.start(inputs.sampled_slots, batch)
        hidden, *of_logits = self._forward(
            inputs.token_ids, inputs.positions, inputs.metadata, logits_rows(inputs, drafts)
        )
        is_plain = not (batch.prompt_logprobs_slots or batch.pooling or batch.refusals)
        if is_plain and len(inputs.sampled_slots) and not batch.stages.are_wanted_by(step.slots):
            result = speculation.verify_at_once(drafts, inputs, of_logits, self.sampler)
            self._observe(inputs, hidden)
            return result
        lengths = np.array([len(drafts[i]) for i in inputs.order[inputs.sampled_rows]], np.int64)
        first = torch.from_numpy(first_rows(lengths))
        drafted = frozenset(inputs.sampled_slots[lengths > 0].tolist())
        result = self._sample(inputs, hidden, *(of[first] for of in of_logits), drafted=drafted)
        result = speculation.verify(drafts, inputs, of_logits, result, self.sampler)
        self._observe(inputs, hidden)
        return result

    def _look_ahead(
        self, scheduler_output: SchedulerOutput, first: ModelRunnerOutput
    ) -> ModelRunnerOutput:
        """Decodes the lookahead tokens of each row, one after the other, after its first sample."""
        slots, wanted = scheduler_output.slots, scheduler_output.num_lookahead_tokens
        results = [(list(range(len(slots))), first)]
        rows = [row for row, num_sampled in enumerate(first.num_sampled) if num_sampled]
        for count in range(1, max(wanted) + 1):
            rows = [
                row
                for row in rows
                if wanted[row] >= count and slots[row] not in results[-1][1].errors
            ]
            if not rows:
                break
            row_slots = [slots[row] for row in rows]
            ones, num_computed = [1] * len(rows), (self.batch.num_tokens[row_slots] - 1).tolist()
            results.append(
                (
                    rows,
                    self._compute(
                        SchedulerOutput(scheduler_output.step, row_slots, ones, num_computed, [])
                    ),
                )
            )
        return merge_outputs(slots, results)

    def _compute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self._sampled(*self._begin(scheduler_output))

    def _sampled(self, inputs: StepInputs, *results: torch.Tensor) -> ModelRunnerOutput:
        result = self._sample(inputs, *results)
        self._observe(inputs, results[0])
        return result

    def _observe(self, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """Shows a pass whose tokens are drawn to the drafter."""
        if self.speculation is not None:
            taps = self.model.taps
            self.speculation.observe(inputs, hidden if taps is None else taps.state[: len(hidden)])

    def _begin(self, scheduler_output: SchedulerOutput) -> tuple[Any, ...]:
        """Runs the model; returns the StepInputs and its results."""
        inputs = self.make_inputs(scheduler_output)
        if self.grammars is not None:
            # masks are computed while the model runs
            self.grammars.start(inputs.sampled_slots, self.batch)
        return inputs, *self._forward(
            inputs.token_ids,
            inputs.positions,
            inputs.metadata,
            inputs.logits_indices,
            *(() if inputs.token_types is None else (inputs.token_types,)),
        )

    def _forward(self, *step: Any) -> tuple[torch.Tensor, ...]:
        """The StepInputs' token_ids, positions, metadata, logits_indices and token_types, if any
        -> the results of run_op_by_op, valid until the next step.
        """
        if (taps := self.model.taps) is not None:
            taps.state[: len(step[0])].zero_()
        if self.is_stage:
            self.model.receive_stream(len(step[0]))
        results = (
            run_op_by_op(self.model, self.ops, *step)
            if self.program is None
            else self.program(*step)
        )
        if self.is_stage:
            self.model.send_stream(results[0])
        return results

    def _apply_differences(self, scheduler_output: SchedulerOutput) -> None:
        batch = self.batch
        if (
            scheduler_output.blocks_to_swap_out
            or scheduler_output.blocks_to_swap_in
            or scheduler_output.blocks_to_copy
        ):
            assert self.block_mover is not None  # there is a cache
            self.block_mover.move(self.attention_layers(), scheduler_output)
        for slot in scheduler_output.freed_slots:
            if self.speculation is not None:
                self.speculation.drafter.leave(slot)
            batch.remove(slot)
        for request in scheduler_output.new_requests:
            batch.add(request)
            if self.speculation is not None:
                row = scheduler_output.slots.index(request.slot)
                num_computed = scheduler_output.num_computed_tokens[row]
                self.speculation.drafter.enter(request.slot, num_computed)
        for slot, block_ids in zip(scheduler_output.slots, scheduler_output.new_block_ids):
            if block_ids:
                batch.append_blocks(slot, block_ids)

    def _sample(
        self,
        inputs: StepInputs,
        hidden: torch.Tensor,
        logits: torch.Tensor | None = None,
        *largest: torch.Tensor,
        drafted: frozenset[int] = frozenset(),
    ) -> ModelRunnerOutput:
        """logits: None of a model without an output head, whose rows are never sampled. drafted:
        slots whose drafts are verified next, which grammars force no tokens on.
        """
        num_rows, sampled_rows = len(inputs.slots), inputs.sampled_rows
        prompt_logprobs, pooled, errors = [], [], self._refusals(inputs.slots)
        if self.batch.pooling and self.pooler is not None:
            pooled, failed = self.pooler(hidden, inputs.slots, inputs.metadata, self.batch)
            errors = failed | errors
        if self.batch.prompt_logprobs_slots:
            prompt_logprobs, failed = self.prompt_scorer(
                hidden, inputs.slots, inputs.metadata, self.batch
            )
            errors = failed | errors
        if not len(sampled_rows):
            return ModelRunnerOutput(
                [0] * num_rows, [], errors=errors, prompt_logprobs=prompt_logprobs, pooled=pooled
            )
        assert logits is not None
        slots = inputs.sampled_slots
        sampled = self.sampler(logits, self.batch, slots, largest)
        errors = {int(slots[row]): problem for row, problem in sampled.errors.items()} | errors
        good = np.array([int(slot) not in errors for slot in slots]) if errors else slice(None)
        self.batch.append_tokens(slots[good], sampled.token_ids[good])
        # all in the order of the SchedulerOutput
        if len(sampled_rows) == inputs.metadata.num_decodes == num_rows and not errors:
            num_sampled, token_ids, logprobs = (
                [1] * num_rows,
                sampled.token_ids.tolist(),
                sampled.logprobs,
            )
        else:
            by_request = np.full(num_rows, -1, np.int64)
            by_request[inputs.order[sampled_rows[good]]] = sampled.token_ids[good]
            has_token = by_request >= 0
            num_sampled, token_ids = has_token.astype(int).tolist(), by_request[has_token].tolist()
            logprobs = [row for row in sampled.logprobs if row.slot not in errors]
        jumping = slots[good]
        if drafted:
            jumping = np.array([slot for slot in jumping.tolist() if slot not in drafted], np.int64)
        if self.grammars is not None and (forced := self.grammars.jump(jumping, self.batch)):
            order = inputs.slots[np.argsort(inputs.order)].tolist()
            num_sampled, token_ids = insert_forced(order, num_sampled, token_ids, forced)
        output = num_sampled, token_ids, logprobs, errors, prompt_logprobs, pooled
        if self.grammars is not None and self.batch.stages.num_slots:
            return ModelRunnerOutput(*output, grammar_s=self.grammars.take_costs(slots))
        return ModelRunnerOutput(*output)

    def _refusals(self, slots: np.ndarray) -> dict[int, RowError]:
        refusals = self.batch.refusals
        return (
            {slot: refusals[slot] for slot in slots.tolist() if slot in refusals}
            if refusals
            else {}
        )

    @torch.inference_mode()
    def execute_dummy_batch(
        self, num_tokens: int = 1, num_logits: int = 1, is_sampled: bool = False
    ) -> None:
        """A forward pass of `num_tokens` one-token rows without effect on the cache.

        Computes logits of `num_logits` rows, as for prompts, and samples each of them if
        `is_sampled`.
        """

        step = dummy_step(
            num_tokens, num_logits, self.batch.num_groups, self.device, self.batch.loras is not None
        )
        with uncounted(self.model):
            types = (step[0],) if self.model.num_token_types else ()
            _, *results = self._forward(*step, *types)
        if is_sampled and results:
            logits, seeds = results[0], torch.zeros_like(step[3])
            halves, ones = torch.full_like(seeds, 0.5, dtype=torch.float32), seeds.int() + 1
            for filters in ((ones, halves, halves), (None, None, None)):
                self.ops.sample_tokens(logits, halves, *filters, seeds, seeds)


def logits_of(model: Model | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """model.compute_logits; None of no model, and of one without an output head."""
    return model.compute_logits if model is not None and model.has_head else None
