"""The engine without its process: accepts requests, runs steps, and returns each client's rows.

Must not know: torch (the executor is imported when it is created), sockets, threads, text.

    step_fn:   schedule ──▶ execute ──▶ _process_model_outputs ──▶ rows by client
    post_step: what must not delay those rows
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..ipc.config import EngineConfig, resolved
from ..ipc.errors import InvalidParameterError, NotEnoughMemoryError
from ..ipc.hops import MessageTimer
from ..ipc.kv_event_publisher import make_publisher
from ..ipc.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    Ready,
    UtilityCall,
    UtilityResult,
    WaveReport,
)
from ..ipc.models.expert_parallel import shares_experts
from ..ipc.models.memory_plan import fitting_tokens
from ..ipc.models.ranks import num_steps_in_flight
from ..ipc.step_messages import ModelRunnerOutput
from .arrivals import Arrivals
from .executor_import import Report, import_executor
from .loras import LoraRegistry
from .observation import Observer, StepRecords, log_step
from .output_rows import MAX_GAP_S, OutputRows
from .pause import PauseControl
from .scheduling.results import end_late_requests
from .scheduling.scheduler import Scheduler
from .scheduling.step import ScheduledStep
from .tracing import Tracing
from .utilities import UtilityRegistry, list_utilities
from .waves import EngineWaves

if TYPE_CHECKING:
    from ..executor.executor import Executor, PendingOutput

KEPT_BYTES = 2**30  # the most of the cache that an engine stores when it ends; it takes seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """What the holder of an EngineCore offers it. By default it is a program that runs the steps
    itself and takes what they return.
    """

    # sends rows that should not wait for the end of a step
    deliver: Callable[[dict[int, EngineCoreOutputs] | None], None] | None = None
    # ends the holder's wait for work; called from any thread
    wake: Callable[[], None] = lambda: None
    # the holder's own counters, for get_metrics; see TransportStats
    count_transport: Callable[[], dict[str, int]] = dict
    message_timer: MessageTimer | None = None  # of a holder with sockets
    report_wave: Callable[[WaveReport], None] = lambda report: None
    # whether rows must be read before there are more
    is_full: Callable[[], bool] = lambda: False


class EngineCore:
    """One model, one scheduler, and any number of clients, each known by an index.

    Used by one thread; nothing here waits except the model. The constructor raises what prevents
    the engine from starting: ModelLoadError, InvalidParameterError, …
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        report: Report | None = None,
        *,
        host: Host = Host(),
        epoch: int = 0,
        engine_index: int = 0,
        is_alone: bool = False,
        imported: Future[Any] | None = None,
        check_every_step: bool = False,
    ):
        """Loads the model and sizes the KV cache, calling `report(stage, fraction)`.

        `is_alone`: this process is the engine's own and runs no other program's code. `imported`:
        of begin_import, if it has been called. `check_every_step`: for tests, post_step checks the
        scheduler's integrity.
        """
        check_config(config)
        report = report or (lambda stage, fraction: None)
        if executor is None:
            executor = import_executor(config, report, is_alone=is_alone, imported=imported)
        self.config = config
        self.executor = executor
        self.host = host
        try:
            self.scheduler, self.ready = _load(config, executor, report, epoch, engine_index)
            self.kv_events = make_publisher(config, epoch, engine_index)
            report("kv cache", 1.0)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                executor.shutdown()
            raise
        self._most_in_flight = num_steps_in_flight(config)
        self.step_fn = self._step_overlapped if self._most_in_flight > 1 else self._step
        # steps of the overlapped form that run, the oldest first
        self._in_flight: deque[tuple[ScheduledStep, PendingOutput]] = deque()
        self.log_stats = not config.service_config.disable_log_stats
        self._log_steps = config.service_config.log_steps
        self._check_every_step = check_every_step
        self.rows = OutputRows(epoch, engine_index)
        self.records = StepRecords()
        self._join_parts(host)
        self._join_observers(host)

    def _join_parts(self, host: Host) -> None:
        """Makes what works on the scheduler and the executor between two steps. Each part gets what
        it uses.
        """
        scheduler = self.scheduler
        executor = self.executor
        rows = self.rows
        self.loras = LoraRegistry(
            self.config.lora_config,
            scheduler,
            executor,
            rows,
            drain=self.drain,
            is_step_in_flight=lambda: self.has_step_in_flight,
            wake=host.wake,
        )
        self.arrivals = Arrivals(
            self.config,
            scheduler,
            executor,
            rows,
            self.loras,
            wake=host.wake,
            deliver=None if host.deliver is None else self._deliver,
        )
        self.gate = self.arrivals.gate
        self.pausing = PauseControl(
            scheduler,
            executor,
            self.arrivals,
            has_work=self.has_work,
            has_pending_outputs=self.has_pending_outputs,
            publish_kv_events=self.publish_kv_events,
        )
        self.waves = None
        if shares_experts(self.config):
            self.waves = EngineWaves(
                executor,
                self.pausing,
                schedule=self.schedule,
                execute=self.execute,
                take_rows=self.take_rows,
                report=host.report_wave,
                is_full=host.is_full,
            )
            self.step_fn = self.waves.step

    def _join_observers(self, host: Host) -> None:
        """Makes what observes those parts, and what clients may call of all of them."""
        scheduler = self.scheduler
        executor = self.executor
        self.tracing = Tracing(
            self.config, scheduler, executor, self.gate, self.step_fn, host.message_timer
        )
        self.observer = Observer(
            scheduler,
            executor,
            self.gate,
            self.records,
            self.pausing,
            self.loras,
            self.waves,
            host.count_transport,
        )
        self.utilities = UtilityRegistry(
            list_utilities(
                self.observer,
                self.pausing,
                self.loras,
                self.tracing,
                self.waves,
                check_integrity=self.check_integrity,
                execute_dummy_batch=executor.execute_dummy_batch,
            ),
            scheduler.counters,
            self.drain,
        )

    # ------------------------------------------------------------ requests and clients

    def add_request(self, request: EngineCoreRequest, client_index: int = 0) -> None:
        """See Arrivals.add."""
        self.arrivals.add(request, client_index)

    def abort_requests(self, request_ids: list[str], client_index: int = 0) -> None:
        """See Arrivals.abort."""
        self.arrivals.abort(request_ids, client_index)

    def drop_client(self, client_index: int) -> None:
        """The client has left or died: its requests, its pause and its trace end, its rows are
        discarded.
        """
        self.arrivals.drop_client(client_index)
        self.rows.drop(client_index)
        self.pausing.drop_client(client_index)
        if self.tracing.is_used_by(client_index):
            self.drain()
            self.tracing.end_trace(client_index=client_index)

    def is_used_by(self, client_index: int) -> bool:
        """Whether the client has requests, a pause or a trace, which end when it leaves."""
        parts = (self.arrivals, self.pausing, self.tracing)
        return any(part.is_used_by(client_index) for part in parts)

    def pace_outputs(self, rows_per_s: int, client_index: int = 0) -> None:
        """See PaceOutputs."""
        self.rows.pace(client_index, rows_per_s)

    def call_utility(self, method: str, args: list[Any], client_index: int = 0) -> Any:
        """See UtilityRegistry.call."""
        return self.utilities.call(method, args, client_index)

    def answer_utility(
        self, call: UtilityCall, client_index: int, answer: Callable[[UtilityResult], None]
    ) -> None:
        """See UtilityRegistry.answer."""
        self.utilities.answer(call, client_index, answer)

    # ------------------------------------------------------------ whether there is work

    def has_pending_outputs(self) -> bool:
        """Whether a client has rows to receive, or a step in flight may bring some."""
        return bool(self.rows) or bool(self._in_flight)

    @property
    def has_step_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def next_deadline(self) -> float | None:
        """See Arrivals.next_deadline."""
        return self.arrivals.next_deadline

    def has_work(self) -> bool:
        """Whether a step would compute something or deliver a row."""
        if self.has_pending_outputs() or (self.gate.waiting and self.gate.has_checked()):
            return True
        if self.scheduler.deadlines and self.scheduler.has_late_requests():
            return True
        if self.loras.is_enabled and self.loras.is_due():
            return True
        if self.waves is not None and self.waves.has_work():
            return True
        is_waiting = len(self.scheduler.requests) > len(self.scheduler.held)
        if not (self.pausing.can_step and is_waiting):
            return False
        return not (self.loras.is_enabled and self.loras.blocks_all())

    def is_idle(self) -> bool:
        """Whether there is no work, and nothing in another thread that may bring some."""
        return not self.has_work() and not self.gate.waiting and not self.loras.is_reading

    @property
    def is_in_wave(self) -> bool:
        """Whether other engines wait for this one."""
        return self.waves is not None and self.waves.state.is_running

    def wait(self) -> None:
        """Without work: blocks until there may be some, if another thread may bring it."""
        if self.loras.is_reading:
            self.loras.wait(self.next_deadline)
        elif self.gate:
            self.gate.wait()

    # ------------------------------------------------------------ the step

    # `step_fn` is one of these two, or that of the waves. It runs one step and returns (rows by
    # client, or None; whether the model ran). An exception means that the engine cannot continue;
    # an error of one request becomes its ERROR row.

    def _step(self) -> tuple[dict[int, EngineCoreOutputs] | None, bool]:
        if (step := self.schedule()) is not None:
            self.execute(step)
        return self.take_rows(everything=step is None), step is not None

    def _step_overlapped(self) -> tuple[dict[int, EngineCoreOutputs] | None, bool]:
        """Does what _step does, but submits the next step before it waits for the oldest one.

        The model never waits for this code, nor a stage of it for another stage:

            model       [ step 1 ][ step 2 ][ step 3 ]
            here    sch 1 | sch 2, wait 1, rows of 1 | sch 3, wait 2, rows of 2 | …
        """
        step = self.schedule()
        if step is not None:
            self._in_flight.append((step, self.executor.submit_model(step.output)))
        is_full = len(self._in_flight) >= self._most_in_flight
        ran = (is_full or step is None) and self._finish_oldest()
        return self.take_rows(everything=step is None), ran or step is not None

    def execute(self, step: ScheduledStep) -> None:
        """Runs a step that `schedule` has returned."""
        self._process_model_outputs(step, self.executor.execute_model(step.output))

    def _finish_oldest(self) -> bool:
        """Waits for the oldest step in flight and processes its result, if there is one."""
        if not self._in_flight:
            return False
        step, pending = self._in_flight.popleft()
        self._process_model_outputs(step, pending.result())
        return True

    def drain(self) -> None:
        """Finishes the steps in flight. Call it before changing anything that steps work on."""
        while self._finish_oldest():
            pass

    def schedule(self) -> ScheduledStep | None:
        """The next step, if there is something to compute and the engine may."""
        if self.gate.waiting and self.gate.has_checked():
            self.arrivals.admit_checked()
        if self.scheduler.deadlines:
            end_late_requests(self.scheduler, self.rows)
        if self.loras.is_enabled:
            self.loras.settle()
        if not self.pausing.can_step:
            return None
        recorder = self.tracing.recorder
        if recorder is not None:
            recorder.begin()
        start_time = time.monotonic()
        step = self.scheduler.schedule()
        if self.loras.is_enabled:
            self.loras.begin_read()
        if step is not None:
            self.records.begin(step, start_time, self.scheduler.counters)
            if recorder is not None:
                recorder.scheduled(step)
            if step.prefills and self.rows.paces:
                self._deliver_before(step)
        return step

    def _deliver_before(self, step: ScheduledStep) -> None:
        """Sends rows of earlier steps that would wait too long for those of this one."""
        if not self.rows.holds_any or self.host.deliver is None:
            return
        if self.records.expected_s(step.output.total_num_scheduled_tokens) > MAX_GAP_S:
            self._deliver()

    def _deliver(self) -> None:
        assert self.host.deliver is not None
        self.host.deliver(self.take_rows())

    def _process_model_outputs(self, step: ScheduledStep, output: ModelRunnerOutput) -> None:
        step.execute_time = self.records.execute_time(step)
        self.scheduler.update_from_output(step, output, self.rows)
        self.records.end(step, self.rows.now, self.scheduler.counters)
        if self._log_steps:
            log_step(step, output, self.scheduler, self.records)
        if self.tracing.recorder is not None:
            self.tracing.recorder.processed(step, output, self.records.last_times())

    def take_rows(self, *, everything: bool = True) -> dict[int, EngineCoreOutputs] | None:
        """The rows for clients. Without `everything`, some may wait for the next step's
        (PaceOutputs).
        """
        stats = self.scheduler.stats() if self.rows and self.log_stats else None
        return self.rows.take(stats, everything=everything)

    # ------------------------------------------------------------ after the step

    def post_step(self, model_executed: bool) -> None:
        """Runs after each step, when its outputs are on their way."""
        if model_executed and self._check_every_step:
            self.scheduler.check_integrity()
        if self.kv_events is not None:
            self.publish_kv_events()
        if self.scheduler.unused_adapters:
            self.loras.free_unused()
        if self.pausing.pending:
            self.pausing.settle()
        if self.tracing.recorder is not None:
            self.tracing.recorder.settle()

    def publish_kv_events(self) -> None:
        """Sends what has changed in the prefix cache to those who watch it."""
        if self.kv_events is not None:
            self.kv_events.publish(self.scheduler.take_kv_events())

    def check_integrity(self) -> bool:
        """Returns True, or raises AssertionError naming what is inconsistent."""
        self.scheduler.check_integrity()
        self.gate.check_integrity(self.scheduler.requests)
        if self.loras.is_enabled:
            self.loras.check_integrity()
        return True

    def shutdown(self) -> None:
        """Releases the model, and keeps what the cache has for the next start, if there is a file
        for it. May be called twice.
        """
        try:
            if self.config.cache_config.kv_offloading_path is not None:
                self.scheduler.keep_cached_blocks(KEPT_BYTES)
        finally:
            self.executor.shutdown()
        if self.kv_events is not None:
            self.kv_events.close()


# -------------------------------------------------------------------- the start


def _load(
    config: EngineConfig, executor: Executor, report: Report, epoch: int, engine_index: int
) -> tuple[Scheduler, Ready]:
    """Loads the model and makes the KV cache and its scheduler."""
    executor.load_model(report)
    report("kv cache", 0.0)
    num_blocks = executor.determine_num_blocks()
    check_num_blocks(config, num_blocks, executor.kv_cache_windows)
    kv_cache_bytes = executor.initialize_kv_cache(num_blocks)
    num_host_blocks, costs = executor.initialize_swap_space()
    scheduler = Scheduler(
        config,
        num_blocks,
        num_host_blocks,
        costs,
        burst_weights_bytes=executor.burst_weights_bytes,
        kv_cache_windows=executor.kv_cache_windows,
        offload=executor.initialize_offload(),
        max_num_seqs=executor.max_num_seqs,
        num_state_checkpoints=executor.num_state_checkpoints,
    )
    return scheduler, Ready(config, num_blocks, kv_cache_bytes, epoch, engine_index)


def check_config(config: EngineConfig) -> None:
    """Checks what the frontend guarantees, and without which a request could wait forever."""
    if "vocab_size" not in config.model_config.hf_config:
        raise InvalidParameterError("hf_config", "must hold the model's vocab_size")
    scheduling, max_model_len = config.scheduler_config, config.model_config.max_model_len
    budget = scheduling.max_num_batched_tokens
    for name, value in (("max_model_len", max_model_len), ("max_num_batched_tokens", budget)):
        if value is None:
            raise InvalidParameterError(name, "must be resolved by the frontend, got None")
    if not scheduling.enable_chunked_prefill and resolved(budget) < resolved(max_model_len):
        raise InvalidParameterError(
            "max_num_batched_tokens",
            f"must be at least max_model_len={max_model_len} without enable_chunked_prefill, got "
            f"{budget}",
        )


def check_num_blocks(config: EngineConfig, num_blocks: int, windows: tuple[int, ...]) -> None:
    """Checks that one sequence of max_model_len fits the cache: otherwise it could never finish.

    `windows`: see KVLayout.
    """
    block_size = config.cache_config.block_size
    max_model_len = resolved(config.model_config.max_model_len)
    capacity = fitting_tokens(config, num_blocks, windows)
    if capacity < max_model_len:
        raise NotEnoughMemoryError(
            "max_model_len",
            f"must be at most {capacity}, the tokens that fit a KV cache of {num_blocks} "
            f"blocks of {block_size} (one is reserved), "
            f"got {max_model_len}; a larger kv_cache_memory_bytes or gpu_memory_utilization makes "
            f"room for more",
        )
