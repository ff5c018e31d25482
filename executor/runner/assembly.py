"""Builds what runs the steps of a model, from the model, its weights and caches, and the tables.

Must not know: how memory is allocated, files, what a request asks for.

    on a CPU          ScheduledAhead ▶ SpeculativeStep ▶ BurstStep ▶ LookAhead ▶ PlainStep ▶ Forward
                      the first three where the engine has them
    on a device       LaunchedSteps ▶ LookAhead ▶ PlainStep ▶ Forward
                      ScheduledAhead ▶ SpeculativeStep ▶ LookAhead ▶ PlainStep ▶ Forward,
                      where the engine drafts
    stage before the  StageStep ▶ PlainStep ▶ Forward
    last one
    last stage        LastStageStep ▶ PlainStep ▶ Forward, where the engine drafts

A Forward is a native program, CUDA graphs, or the model's code operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from ...ipc.step_messages import SchedulerOutput
from ...kernels.cpu.native.replay import Program
from ...kernels.registry import OpTable
from ..device import CopyToHost
from ..input_batch import InputBatch
from ..model import Forward, ImageEncoder, Model, Taps
from ..models.images import ImageReader
from ..pooling.pooler import Pooler
from ..program.narrowed import NarrowedForward, Sections
from ..program.step_program import OpByOp, StagedForward, TappedForward
from ..sampling.fused_sampler import FusedSampler
from ..sampling.grammar import Grammars
from ..sampling.prompt_logprobs import PromptScorer
from ..sampling.sampler import Sampler
from ..state_memory import StateMemory
from .block_mover import BlockMover
from .bursts import Bursts, BurstStep
from .cuda_graphs import GraphedStep
from .device_inputs import DeviceInputMaker, DeviceTables
from .image_table import ImageTable
from .launched_steps import LaunchedSteps, StepLauncher
from .look_ahead import LookAhead
from .model_runner import ModelRunner
from .plain_step import PlainStep, StepRunner
from .special_rows import SpecialRows
from .speculation.scheduled_ahead import ScheduledAhead
from .speculation.speculative_step import ObservedStep, SpeculativeStep, VerifyingPass
from .speculation.staged import KeptDrafts, LastStageStep
from .speculation.verification import Speculation
from .stage_step import PendingTokens, StageStep
from .state_table import StateTable
from .step_inputs import StepInputMaker

Apply = Callable[[SchedulerOutput], None]  # puts a step's differences into the tables


@dataclass(frozen=True, eq=False)
class RunnerState:
    """What outlives a ModelRunner: the tables of requests and what belongs to their slots.

    tables and copy_to_host: of a device that steps are launched on. pending: of a stage before the
    last one. states: of a model that keeps any. images: of a model that reads any. kept: of an
    engine that drafts and has stages.
    """

    batch: InputBatch
    device: torch.device
    grammars: Grammars | None = None
    tables: DeviceTables | None = None
    copy_to_host: CopyToHost | None = None
    pending: PendingTokens | None = None
    states: StateTable | None = None
    images: ImageTable | None = None
    kept: KeptDrafts | None = None


def on_device(state: RunnerState, ops: OpTable, copy_to_host: CopyToHost) -> RunnerState:
    """The state with its tables on the device, before the first request; tokens return through
    `copy_to_host`.
    """
    tables = DeviceTables(state.batch, ops, state.device)
    pending = None if state.pending is None else PendingTokens(state.batch, tables, state.kept)
    return replace(state, tables=tables, copy_to_host=copy_to_host, pending=pending)


def assemble(
    state: RunnerState,
    model: Model,
    ops: OpTable,
    forward: Forward | None = None,
    mover: BlockMover | None = None,
    speculation: Speculation | None = None,
    pooler: Pooler | None = None,
    states: StateMemory | None = None,
    is_divided: bool = False,
    sections: Sections | None = None,
) -> ModelRunner:
    """forward: None: operation by operation. mover: None as long as there is no cache. states: of a
    model that keeps any. is_divided: into stages. sections: of a model that has any.
    """
    batch, forward = state.batch, forward or OpByOp(model, ops)
    run_pass = _around(forward, model, is_divided)
    is_observed = speculation is not None and speculation.drafter.sees_every_pass
    if sections is not None and not is_observed:
        run_pass = NarrowedForward(run_pass, sections, partial(_reads_all, batch))
    scorer = PromptScorer(model.compute_logits, ops, model.config.vocab_size, model.adapter_rows)
    special = SpecialRows(batch, _sampler(state, ops), state.grammars, scorer, pooler)
    apply = differences(batch, mover)
    if states is not None and state.states is not None:
        apply = in_turn(move_states(states, state.states), apply)
    if model.images is not None and state.images is not None:
        apply = in_turn(state.images.apply, apply)
        if model.encoder is not None:  # else an earlier stage encodes
            apply = in_turn(encode_images(model.encoder, model.images), apply)
    if state.tables is not None:
        parts = _device_parts(state, state.tables, model, forward, run_pass, special)
        steps = _on_device(state, state.tables, parts, apply, speculation, model.taps)
    else:
        tables = {"states": state.states, "images": state.images}
        make_inputs = StepInputMaker(batch, batch.block_size, model.num_token_types, **tables)
        bursts = None
        if isinstance(forward, Program) and "sample_tokens" in ops.native and not is_divided:
            bursts = Bursts(forward, batch, make_inputs)
        parts = batch, make_inputs, run_pass, ops, special
        if speculation is None:
            steps = _plain(parts, bursts, apply)
        else:
            steps = _speculative(parts, bursts, apply, speculation, model.taps, state.kept)
    if state.pending is not None:
        placed = _unchanged if state.kept is None else state.kept.placed
        steps = steps._replace(step=StageStep(steps.plain, state.pending, placed))
    return ModelRunner(
        model=model,
        ops=ops,
        batch=batch,
        device=state.device,
        forward=forward,
        run_pass=run_pass,
        plain=steps.plain,
        bursts=steps.bursts,
        speculation=speculation,
        launched=steps.launched,
        apply=steps.apply,
        step=steps.step,
    )


def _sampler(state: RunnerState, ops: OpTable) -> Sampler | FusedSampler:
    return FusedSampler(ops) if state.device.type == "cuda" else Sampler(ops)


def _around(forward: Forward, model: Model, is_divided: bool) -> Forward:
    """The passes of a model with taps, or of a stage."""
    forward = StagedForward(model, forward) if is_divided else forward
    return forward if model.taps is None else TappedForward(model.taps, forward)


def _reads_all(batch: InputBatch) -> bool:
    """Whether hidden states of tokens without logits are read."""
    return bool(batch.pooling or batch.prompt_logprobs_slots)


class _Steps(NamedTuple):
    """The fields of a ModelRunner that depend on the kind of its steps."""

    plain: PlainStep
    step: StepRunner
    apply: Apply
    bursts: Bursts | None = None
    launched: LaunchedSteps | None = None


# of a PlainStep
_Parts = tuple[InputBatch, StepInputMaker | DeviceInputMaker, Forward, OpTable, SpecialRows]


def _plain(parts: _Parts, bursts: Bursts | None, apply: Apply) -> _Steps:
    plain = PlainStep(*parts)
    return _Steps(plain, _with_bursts(bursts, LookAhead(parts[0], plain)), apply, bursts)


def _speculative(
    parts: _Parts,
    bursts: Bursts | None,
    apply: Apply,
    speculation: Speculation,
    taps: Taps | None,
    kept: KeptDrafts | None,
) -> _Steps:
    """kept: of the last of several stages."""
    batch, observed = parts[0], ObservedStep(*parts, speculation=speculation, taps=taps)
    verify = VerifyingPass(batch, speculation, observed)
    step: StepRunner
    if kept is not None:
        step = LastStageStep(batch, speculation, verify, kept)
    else:
        without_drafts = _with_bursts(bursts, LookAhead(batch, observed))
        drafting = SpeculativeStep(batch, speculation, bursts, verify, without_drafts)
        step = ScheduledAhead(batch, drafting)
    return _Steps(observed, step, tell_drafter(speculation, apply), bursts)


def _with_bursts(bursts: Bursts | None, step: StepRunner) -> StepRunner:
    return step if bursts is None else BurstStep(bursts, step)


_DeviceParts = tuple[InputBatch, DeviceInputMaker, Forward, OpTable, SpecialRows]


def _device_parts(
    state: RunnerState,
    tables: DeviceTables,
    model: Model,
    forward: Forward,
    run_pass: Forward,
    special: SpecialRows,
) -> _DeviceParts:
    """The parts of a PlainStep whose tables are on a device."""
    buffers = forward.buffers if isinstance(forward, GraphedStep) else no_buffers
    batch, ops = state.batch, special.sampler.ops
    others = model.num_token_types, state.states, state.images
    make_inputs = DeviceInputMaker(tables, batch.block_size, ops, buffers, *others)
    return batch, make_inputs, run_pass, ops, special


def _on_device(
    state: RunnerState,
    tables: DeviceTables,
    parts: _DeviceParts,
    apply: Apply,
    speculation: Speculation | None,
    taps: Taps | None,
) -> _Steps:
    """Steps whose tables are on a device. A stage before the last one does not launch them, nor
    does an engine that drafts, since what follows depends on the tokens.
    """
    apply = in_turn(apply, tables.note_differences)
    if speculation is not None:
        return _speculative(parts, None, apply, speculation, taps, state.kept)
    batch, make_inputs, run_pass, ops, _ = parts
    plain = PlainStep(*parts)
    look_ahead = LookAhead(batch, plain)
    if state.pending is not None:
        return _Steps(plain, look_ahead, apply)
    assert state.copy_to_host is not None
    launcher = StepLauncher(batch, ops, tables, make_inputs, run_pass, state.copy_to_host)
    launched = LaunchedSteps(batch, apply, launcher, look_ahead)
    return _Steps(plain, launched, launched.apply, launched=launched)


def _unchanged(step: SchedulerOutput) -> SchedulerOutput:
    return step


def no_buffers(count: int) -> None:
    """GraphedStep.buffers where there are no graphs."""


def differences(batch: InputBatch, mover: BlockMover | None) -> Apply:
    """Moves a step's blocks, then applies its other differences to the tables."""

    def apply(scheduler_output: SchedulerOutput) -> None:
        if (
            scheduler_output.blocks_to_swap_out
            or scheduler_output.blocks_to_swap_in
            or scheduler_output.blocks_to_copy
        ):
            assert mover is not None  # there is a cache
            mover.move(scheduler_output)
        batch.apply(scheduler_output)

    return apply


def move_states(memory: StateMemory, table: StateTable) -> Apply:
    """Copies states as a step begins, and notes which copies its rows make."""

    def apply(scheduler_output: SchedulerOutput) -> None:
        memory.copy(scheduler_output.state_copies)
        table.apply(scheduler_output)

    return apply


def encode_images(encoder: ImageEncoder, reader: ImageReader) -> Apply:
    """Encodes images as a step begins."""

    def apply(scheduler_output: SchedulerOutput) -> None:
        for image in scheduler_output.images_to_encode:
            pixels = np.frombuffer(image.pixels.data, np.uint8).reshape(image.pixels.shape)
            rows = encoder.encode([torch.from_numpy(pixels.copy())])  # a received one is read-only
            reader.store(rows, image.num_rows, image.first_row)

    return apply


def in_turn(first: Apply, second: Apply) -> Apply:
    def apply(scheduler_output: SchedulerOutput) -> None:
        first(scheduler_output)
        second(scheduler_output)

    return apply


def tell_drafter(speculation: Speculation, apply: Apply) -> Apply:
    """Tells the drafter of requests that leave and enter slots, while their tokens are there."""

    def apply_and_tell(scheduler_output: SchedulerOutput) -> None:
        for slot in scheduler_output.freed_slots:
            speculation.drafter.leave(slot)
        apply(scheduler_output)
        for request in scheduler_output.new_requests:
            row = scheduler_output.slots.index(request.slot)
            num_computed = scheduler_output.num_computed_tokens[row]
            speculation.drafter.enter(request.slot, num_computed)

    return apply_and_tell
