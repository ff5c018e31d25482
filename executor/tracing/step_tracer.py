"""Records what a rank does in a number of steps: inputs, stages, and kernels with their times.

Must not know: the scheduler, what is shown of a trace.

A recorded program is timed by the native library, which notes when each thread worked on each call.
Everything else is timed around the operations of the table (instruments.py). On a GPU, operations
and the parts of a step are timed by events on its stream, since the host only launches them. Only
numbers are kept while a step runs; `take` adds the names.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from ctypes import addressof
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

from ...ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ...ipc.trace import Input, Kernel, RankTrace, Span, place_of_function
from ...kernels.cpu.native.calls import Op
from ...kernels.cpu.native.library import library
from ...kernels.cpu.native.replay import Program
from ...kernels.cpu.native.timing import CallTimer, timed_calls
from ..model import Forward, Model
from ..program.narrowed import NarrowedForward
from ..program.step_program import OpByOp, WrappedForward, record_origins
from ..runner.cuda_graphs import GraphedStep
from ..runner.model_runner import ModelRunner
from .instruments import Instruments, Site
from .operations import (
    calling_place,
    dtype_of,
    implementation_place,
    kept,
    recorded_places,
    work_of,
)

INPUTS = "token_ids", "positions", "metadata", "logits_indices"
PARTS = "query_start_loc", "seq_lens", "block_tables", "slot_mapping"  # of the metadata
OF_METADATA = attrgetter(*PARTS)
INPUT_NAMES = "token_ids", "positions", *PARTS, "logits_indices"


EXTERNAL = Op.EXTERNAL.name.lower()
NOWHERE = Site("", "", "", None)


class _Operation(NamedTuple):
    site: Site
    begin: Any  # seconds, or an event
    end: Any
    arguments: list[Any]
    place: str
    less_s: float = 0.0  # of a module: operations within, which are counted themselves


class _Part(NamedTuple):
    name: str
    begin: Any  # seconds, or an event
    end: Any
    place: str


Timed = TypeVar("Timed", _Operation, _Part)


class _Recorded(NamedTuple):
    """A step as it was recorded, with seconds in place of events."""

    begin_s: float
    end_s: float
    inputs: tuple[Any, ...]  # as the model was given them; only their shapes are read later
    parts: list[_Part]
    operations: list[_Operation]
    runs: list[Any]  # of the native program
    routed: list[tuple[int, torch.Tensor, torch.Tensor]]  # (layer, counts before, after)


class StepTracer:
    """A StepRunner: runs the steps of a runner, of which it records the first `num_steps`."""

    def __init__(self, runner: ModelRunner, num_steps: int, num_threads: int):
        self._runner, self._num_left = runner, num_steps
        self._device = runner.device
        self._is_on_gpu = self._device.type != "cpu"
        self.notes: list[str] = []
        self._steps: dict[int, _Recorded] = {}
        self._operations: list[_Operation] = []
        self._within: list[list[Any]] = []  # modules entered: [begin, seconds of parts]
        self._is_inside = False  # an operation of the table runs
        self._parts: list[_Part] = []
        self._inputs: tuple[Any, ...] = ()
        # kept until the trace is taken: their calls are read then
        self._programs = _programs_of(runner)
        self._bursts = runner.bursts
        self._origins: dict[int, tuple[Site, str, str]] = {}  # by the address of a call
        self._counts = {i: one.counts for i, one in runner.model.routed_tokens().items()}
        self._site = NOWHERE
        self._isa = library.isa if library is not None else ""
        self.instruments = Instruments(runner.ops, self._around, self._enter, self._leave)
        self._attach(num_threads)

    def _attach(self, num_threads: int) -> None:
        runner, timer = self._runner, CallTimer(num_threads)
        for model, program in self._programs:
            self._find_origins(model, program)
            program.set_timer(timer)
        put = self.instruments
        put.attach(runner.model)
        plain, special, launched = runner.plain, runner.plain.special, runner.launched
        launcher = None if launched is None else launched.launcher
        for owner in (plain, special.sampler, special.prompt_scorer, special.grammars, launcher):
            if owner is not None:
                for name, value in list(vars(owner).items()):
                    if value is runner.ops:
                        put.replace(owner, name, put.table("sampler"))
        run_pass = self._spanned("model", self._instrumented())
        put.replace(plain, "forward", run_pass)
        if launcher is not None:
            put.replace(launcher, "_forward", run_pass)
            make_inputs = launcher.inputs
            for name in ("ship", "prepare"):  # plain steps call them, too
                put.replace(make_inputs, name, self._spanned("inputs", getattr(make_inputs, name)))
        else:
            put.replace(plain, "make_inputs", self._spanned("inputs", plain.make_inputs))
        put.replace(plain, "end", self._spanned("sampler", plain.end))
        if (bursts := runner.bursts) is not None:
            put.replace(bursts, "passes", self._spanned("model", bursts.passes))
            for_burst = self._spanned("inputs", bursts.make_inputs.for_burst)
            put.replace(bursts.make_inputs, "for_burst", for_burst)

    def _instrumented(self) -> Forward:
        """The runner's passes with instruments: operation by operation unless they are recorded."""
        runner, put = self._runner, self.instruments
        if isinstance(runner.forward, Program):
            return runner.run_pass
        if isinstance(runner.forward, GraphedStep):
            self.notes.append("traced steps run without CUDA graphs")
        op_by_op = OpByOp(runner.model, put.table(""))
        if runner.run_pass is runner.forward:
            return op_by_op
        around = runner.run_pass
        while isinstance(around, WrappedForward) and around.forward is not runner.forward:
            around = around.forward
        put.replace(around, "forward", op_by_op)
        return runner.run_pass

    def _find_origins(self, model: Model, program: Program) -> None:
        """Finds the module of each call of the program: it is recorded again, with instruments."""

        def around(site: Site, function: Callable, args: Any, kwargs: Any) -> Any:
            before, self._site = self._site, site
            try:
                return function(*args, **kwargs)
            finally:
                self._site = before

        runner = self._runner
        put = Instruments(runner.ops, around, _nothing, _nothing)
        put.attach(runner.model)
        try:
            origins = record_origins(
                model,
                put.table(""),
                program.limits,
                runner.batch.num_groups,
                lambda: (self._site, *recorded_places()),
            )
        finally:
            put.detach()
        if len(origins) == len(program.calls):
            self._origins |= zip(map(addressof, program.calls), origins)

    def stop(self) -> None:
        """Puts everything back; `take` still returns what was recorded."""
        self._num_left = 0
        self.instruments.detach()
        for _, program in self._programs:
            program.set_timer(None)

    # ------------------------------------------------------------ while a step runs

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step, and records it while there are steps to record."""
        if not self._num_left or not scheduler_output.slots:
            return self._runner.execute_model(scheduler_output)
        begin_s = time.monotonic()
        self._operations, self._parts, self._inputs, self._within = [], [], (), []
        before = [count.clone() for count in self._counts.values()]
        origin = self._now() if self._is_on_gpu else None
        output = self._runner.execute_model(scheduler_output)
        if self._is_on_gpu:
            torch.cuda.synchronize(self._device)
        end_s = time.monotonic()
        timer = self._programs[0][1].timer if self._programs else None  # it is that of all
        runs = [] if timer is None else timer.take()
        operations, parts = self._operations, self._parts
        if self._is_on_gpu:
            operations = [_on_host(one, origin, begin_s) for one in operations]
            parts = [_on_host(one, origin, begin_s) for one in parts]
        after = [count.clone() for count in self._counts.values()]
        routed = list(zip(self._counts, before, after))
        self._steps[scheduler_output.step] = _Recorded(
            begin_s, end_s, self._inputs, parts, operations, runs, routed
        )
        self._num_left -= 1
        if not self._num_left:
            self.stop()
        return output

    def _now(self) -> Any:
        if not self._is_on_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _around(self, site: Site, function: Callable, args: Any, kwargs: Any) -> Any:
        if self._is_inside:
            return function(*args, **kwargs)
        self._is_inside = True
        begin = self._now()
        try:
            return function(*args, **kwargs)
        finally:
            end = self._now()
            self._is_inside = False
            if self._within and not self._is_on_gpu:
                self._within[-1][1] += end - begin
            arguments = kept([*args, *kwargs.values()])
            place = calling_place(sys._getframe(2))
            self._operations.append(_Operation(site, begin, end, arguments, place))

    def _enter(self, site: Site) -> None:
        self._within.append([self._now(), 0.0])

    def _leave(self, site: Site) -> None:
        begin, parts_s = self._within.pop()
        end = self._now()
        if self._is_on_gpu:  # the stream's time between a module's operations is not its own
            return
        if self._within:
            self._within[-1][1] += end - begin
        self._operations.append(_Operation(site, begin, end, [], "", parts_s))

    def _spanned(self, name: str, function: Callable) -> Callable:
        place = place_of_function(function) or place_of_function(type(function).__call__)

        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "model" and not self._inputs:
                self._inputs = args
            begin = self._now()
            try:
                return function(*args, **kwargs)
            finally:
                self._parts.append(_Part(name, begin, self._now(), place))

        return run

    # ------------------------------------------------------------ afterwards

    def take(self) -> dict[int, RankTrace]:
        """The recorded steps by their numbers."""
        return {step: self._as_trace(recorded) for step, recorded in self._steps.items()}

    def _as_trace(self, recorded: _Recorded) -> RankTrace:
        kernels = [self._kernel(operation) for operation in recorded.operations]
        for run in recorded.runs:
            kernels += [self._call(call) for call in timed_calls(run)]
        kernels.sort(key=lambda kernel: kernel.begin_s)
        return RankTrace(
            recorded.begin_s,
            recorded.end_s - recorded.begin_s,
            _inputs(_shapes(recorded.inputs)),
            [Span(name, begin, end - begin, place) for name, begin, end, place in recorded.parts],
            kernels,
            {layer: (after - before).tolist() for layer, before, after in recorded.routed},
        )

    def _kernel(self, operation: _Operation) -> Kernel:
        site, arguments = operation.site, operation.arguments
        found, weight_bytes = work_of(site, arguments, self.instruments.weights)
        seconds = operation.end - operation.begin - operation.less_s
        return Kernel(
            site.module,
            site.op,
            site.implementation,
            found.shape,
            dtype_of(arguments),
            operation.begin,
            seconds,
            weight_bytes,
            found.num_bytes,
            found.flops,
            operation.place,
            implementation_place(site.function),
        )

    def _call(self, call: Any) -> Kernel:
        site, place, implementation_place = self._origins.get(call.address, (NOWHERE, "", ""))
        op, implementation = call.op, f"native {self._isa}"
        if op == EXTERNAL and site.op:  # a function of a plugin
            op, implementation = site.op, f"{site.implementation}, native"
        begins, ends = [begin for _, begin, _ in call.threads], [end for *_, end in call.threads]
        weights = self.instruments.weights
        return Kernel(
            site.module,
            op,
            implementation,
            call.work.shape,
            call.dtype,
            min(begins, default=0.0),
            max(ends, default=0.0) - min(begins, default=0.0),
            sum(weights.get(address, 0) for address in call.weights),
            call.work.num_bytes,
            call.work.flops,
            place,
            implementation_place,
            call.threads,
            call.pass_number,
        )


def _programs_of(runner: ModelRunner) -> list[tuple[Model, Program]]:
    """The programs of a runner with what each was recorded from, first the one of all layers."""
    if not isinstance(runner.forward, Program):
        return []
    found = [(runner.model, runner.forward)]
    if isinstance(runner.run_pass, NarrowedForward):
        sections = runner.run_pass.sections
        found += zip(sections.models, (sections.first, sections.last))
    return found


def _nothing(site: Site) -> None:
    pass


def _on_host(timed: Timed, origin: Any, begin_s: float) -> Timed:
    """An operation or a part with seconds in place of events. origin: the event of begin_s."""
    begin, end = (begin_s + origin.elapsed_time(event) / 1e3 for event in (timed.begin, timed.end))
    return timed._replace(begin=begin, end=end)


def _shapes(args: tuple[Any, ...]) -> list[tuple[torch.Size, torch.dtype] | None]:
    """Shapes and dtypes of the tensors that the model gets. args: those of Forward."""
    tensors: list[Any] = []
    for name, value in zip(INPUTS, args):
        tensors += OF_METADATA(value) if name == "metadata" else [value]
    return [
        (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None for value in tensors
    ]


def _inputs(kept: list[tuple[torch.Size, torch.dtype] | None]) -> list[Input]:
    return [
        Input(name, list(one[0]), str(one[1]).removeprefix("torch."))
        for name, one in zip(INPUT_NAMES, kept)
        if one is not None
    ]
