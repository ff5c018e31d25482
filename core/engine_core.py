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
from typing import TYPE_CHECKING, Any

import msgspec

from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidParameterError
from ..ipc.hops import MessageTimer
from ..ipc.kv_event_publisher import make_publisher
from ..ipc.messages import (
    BEAT,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    Ready,
    UtilityCall,
    UtilityResult,
)
from ..ipc.models.expert_parallel import shares_experts
from ..ipc.models.ranks import num_ranks, num_steps_in_flight
from ..ipc.step_messages import ModelRunnerOutput
from ..ipc.threads import begin
from ..ipc.trace import EngineTrace
from . import arrivals, utilities
from .expert_load import by_layer, summary
from .grammar_gate import GrammarGate
from .loras import Loras
from .observation import StepRecords, describe_state, observe
from .output_rows import MAX_GAP_S, OutputRows
from .pause import PauseControl
from .request_checks import check_config, check_num_blocks, check_request
from .scheduling.results import end_late_requests, write_end
from .scheduling.scheduler import Scheduler
from .scheduling.step import ScheduledStep
from .step_log import log_step
from .step_tracer import StepTracer, check_num_steps
from .waves import EngineWaves

if TYPE_CHECKING:
    from ..executor.executor import Executor, PendingOutput

Report = Callable[[str, float], None]


def begin_import() -> Future[Any]:
    """Runs import_executor in a thread, for a CPU and before the configuration is known."""
    # first here: this thread needs it while the other one holds the GIL
    from ..executor.weights import early_memory  # noqa: F401

    return begin(import_executor)


def import_executor(config: EngineConfig | None = None) -> Callable[[], None]:
    """Imports what runs a model into the engine's own process, on a CPU if `config` follows later.

    Returns a function to call when the engine is ready: it releases memory of the import.
    """
    from ..executor import lean_import

    if config is None or num_ranks(config) == 1:  # ranks import it in their own processes
        lean_import.import_torch(config)
        from ..executor import single_process  # noqa: F401
    return lean_import.give_back


class EngineCore:
    """One model, one scheduler, and any number of clients, each known by an index.

    Used by one thread; nothing here waits except the model. The constructor raises what prevents
    the engine from starting: ModelLoadError, InvalidParameterError, …
    """

    UTILITIES = (
        frozenset({"ping", "beat", "observe", "scheduler_state", "get_metrics", "status"})
        | {"expert_load", "check_integrity", "execute_dummy_batch"}
        | {"start_trace", "wait_for_trace", "end_trace"}
        | PauseControl.UTILITIES
        | Loras.UTILITIES
        | EngineWaves.UTILITIES
    )
    # those that wait for the step in flight first
    DRAINING = (
        PauseControl.DRAINING | Loras.DRAINING | {"execute_dummy_batch", "start_trace", "end_trace"}
    )
    # those that are told which client calls
    OWNED = frozenset({"pause", "start_trace", "end_trace"})

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        report: Report | None = None,
        *,
        epoch: int = 0,
        engine_index: int = 0,
        is_alone: bool = False,
        imported: Future[Any] | None = None,
    ):
        """Loads the model and sizes the KV cache, calling `report(stage, fraction)`.

        `is_alone`: this process is the engine's own and runs no other program's code. `imported`:
        of import_executor, if it has been called.
        """
        check_config(config)
        report = report or (lambda stage, fraction: None)
        give_back: Callable[[], None] | None = None
        if executor is None:
            report("import", 0.0)
            from ..executor.weights import early_memory

            early_memory.begin(config, imports_torch=imported is not None)
            if imported is not None:
                imported.result()
            if is_alone:
                give_back = import_executor(config)
            from ..executor.executor import make_executor

            executor = make_executor(config)
            report("import", 1.0)
        self.config = config
        self.executor = executor
        try:
            executor.load_model(report)
            report("kv cache", 0.0)
            num_blocks = executor.determine_num_blocks()
            windows = executor.kv_cache_windows
            check_num_blocks(config, num_blocks, windows)
            kv_cache_bytes = executor.initialize_kv_cache(num_blocks)
            swap_space = executor.initialize_swap_space()
            offload = executor.initialize_offload()
            self.kv_events = make_publisher(config, epoch, engine_index)
            if give_back is not None:
                give_back()
            report("kv cache", 1.0)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                executor.shutdown()
            raise
        self.scheduler = Scheduler(
            config, num_blocks, *swap_space, executor.burst_weights_bytes, windows, offload
        )
        self._most_in_flight = num_steps_in_flight(config)
        self.step_fn = self._step_overlapped if self._most_in_flight > 1 else self._step
        # of the overlapped form; the oldest first
        self._in_flight: deque[tuple[ScheduledStep, PendingOutput]] = deque()
        self.ready = Ready(config, num_blocks, kv_cache_bytes, epoch, engine_index)
        self.log_stats = not config.service_config.disable_log_stats
        self.check_every_step = False  # for tests: post_step runs check_integrity
        # the host's own counters, for get_metrics; see TransportStats
        self.host_counters: Callable[[], dict[str, int]] = dict
        # Set by the host, for rows that should not wait for the end of a step.
        self.hand_out: Callable[[dict[int, EngineCoreOutputs] | None], None] | None = None
        self.pausing = PauseControl(self)
        self.gate = GrammarGate()  # the host sets gate.wake
        self.loras = Loras(self)
        self.rows = OutputRows(epoch, engine_index)
        self._step_records = StepRecords()
        self.tracer: StepTracer | None = None  # while steps are traced
        self.message_timer: MessageTimer | None = None  # of a host with sockets, which sets it
        self._log_steps = config.service_config.log_steps
        if (waves := EngineWaves(self) if shares_experts(config) else None) is not None:
            self.step_fn = waves.step
        self.waves = waves

    # ------------------------------------------------------------ requests

    def add_request(self, request: EngineCoreRequest, client_index: int = 0) -> None:
        """Queues a request.

        A request that cannot be served gets an ERROR row in the next outputs; nothing is raised.
        """
        try:
            check_request(request, self.config)
            if self.scheduler.is_in_use(request.request_id) or request.request_id in self.gate:
                raise InvalidParameterError(
                    "request_id", f"{request.request_id!r} is already in use"
                )
        except InvalidParameterError as refusal:
            return arrivals.refuse(self, str(request.request_id), refusal, client_index)
        grammar = request.structured_outputs
        if grammar is None:
            return arrivals.enter(self, request, client_index)
        arrival = self.scheduler.reserve_arrivals(request.num_completions)
        owner = f"{client_index} {request.owner}"
        is_known = bool(request.resume_tokens)
        check = self.executor.check_grammar(grammar, is_known=is_known, owner=owner)
        self.gate.add(request, client_index, arrival, check)
        arrivals.admit_checked(self)

    def abort_requests(self, request_ids: list[str], client_index: int = 0) -> None:
        """Ends this client's live requests among these; each gets an ABORT row.

        Other clients' and unknown ids are ignored.
        """
        if self.gate:
            # in the scheduler it ends like any other
            for gated in self.gate.abort(request_ids, client_index):
                self.scheduler.add_request(
                    gated.request, client_index, gated.arrival, gated.queued_time
                )
        for request in self.scheduler.abort_requests(request_ids, client_index):
            write_end(request, FinishReason.ABORT, self.rows, time.monotonic())

    def drop_client(self, client_index: int) -> None:
        """The client has left or died: its requests and its pause end, its rows are discarded."""
        mine = [
            request_id
            for request_id, request in self.scheduler.requests.items()
            if request.client_index == client_index
        ]
        self.scheduler.counters.num_requests_orphaned += len(
            self.scheduler.abort_requests(mine, client_index)
        )
        self.scheduler.counters.num_requests_orphaned += self.gate.drop_client(client_index)
        self.rows.drop(client_index)
        self.pausing.drop_client(client_index)
        if self.tracer is not None and self.tracer.client_index == client_index:
            self.drain()
            self._drop_trace()

    def is_used_by(self, client_index: int) -> bool:
        """Whether the client has requests, a pause or a trace, which end when it leaves."""
        return (
            any(one.client_index == client_index for one in self.scheduler.requests.values())
            or self.gate.is_used_by(client_index)
            or self.pausing.is_used_by(client_index)
            or (self.tracer is not None and self.tracer.client_index == client_index)
        )

    def pace_outputs(self, rows_per_s: int, client_index: int = 0) -> None:
        """See PaceOutputs."""
        self.rows.pace(client_index, rows_per_s)

    def num_unheld_requests(self) -> int:
        """The number of unfinished requests, without those that a pause holds."""
        num_unchecked = sum(not self.scheduler.is_held_back(gated.arrival) for gated in self.gate)
        return len(self.scheduler.requests) - len(self.scheduler.held) + num_unchecked

    def owes_rows(self) -> bool:
        """Whether a client has rows to receive, or a step in flight may bring some."""
        return bool(self.rows) or self.has_step_in_flight

    @property
    def next_deadline(self) -> float | None:
        """When a request without its end becomes late, by time.monotonic()."""
        if not self.gate:
            return self.scheduler.next_deadline
        deadlines = self.scheduler.next_deadline, self.gate.next_deadline
        return min(filter(None, deadlines), default=None)

    def has_work(self) -> bool:
        """Whether a step would compute something or deliver a row."""
        if self.owes_rows() or self.gate.has_checked() or self.scheduler.has_late_requests():
            return True
        if self.loras.is_due() or (self.waves is not None and self.waves.has_work()):
            return True
        is_waiting = len(self.scheduler.requests) > len(self.scheduler.held)
        return self.pausing.can_step and is_waiting and not self.loras.blocks_all()

    def is_idle(self) -> bool:
        """Whether there is no work, and nothing in another thread that may bring some."""
        return not self.has_work() and not self.gate and not self.loras.is_reading

    @property
    def has_step_in_flight(self) -> bool:
        return bool(self._in_flight)

    @property
    def takes_part(self) -> bool:
        """Whether other engines wait for this one."""
        return self.waves is not None and self.waves.state.is_running

    def wait(self) -> None:
        """Without work: blocks until there may be some, if another thread may bring it."""
        if self.loras.is_reading:
            self.loras.wait()
        elif self.gate:
            self.gate.wait()

    # ------------------------------------------------------------ the step

    # `step_fn` is one of these two. It runs one step and returns (rows by client, or None; whether
    # the model ran). An exception means that the engine cannot continue; an error of one request
    # becomes its ERROR row.

    def _step(self) -> tuple[dict[int, EngineCoreOutputs] | None, bool]:
        if (step := self.schedule()) is not None:
            self.execute(step)
        return self.take_rows(everything=step is None), step is not None

    def execute(self, step: ScheduledStep) -> None:
        """Runs a step that `schedule` has returned."""
        self._process_model_outputs(step, self.executor.execute_model(step.output))

    def _step_overlapped(self) -> tuple[dict[int, EngineCoreOutputs] | None, bool]:
        """As _step, but schedules and submits the next step before it waits for the oldest one.

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

    def take_rows(self, *, everything: bool = True) -> dict[int, EngineCoreOutputs] | None:
        """The rows for clients. Without `everything`, some may wait for the next step's
        (PaceOutputs).
        """
        stats = self.scheduler.stats() if self.rows and self.log_stats else None
        return self.rows.take(stats, everything=everything)

    def schedule(self) -> ScheduledStep | None:
        """The next step, if there is something to compute and the engine may."""
        if self.gate.has_checked():
            arrivals.admit_checked(self)
        end_late_requests(self.scheduler, self.rows)
        if self.loras.is_enabled:
            self.loras.settle()
        if not self.pausing.can_step:
            return None
        tracer = self.tracer
        if tracer is not None:
            tracer.begin()
        start_time = time.monotonic()
        step = self.scheduler.schedule()
        if self.loras.is_enabled:
            self.loras.begin_read()
        if step is not None:
            self._step_records.begin(step, start_time, self.scheduler.counters)
            if tracer is not None:
                tracer.scheduled(step)
            if step.prefills and self.rows.holds_any and self.hand_out is not None:
                if (
                    self._step_records.expected_s(step.output.total_num_scheduled_tokens)
                    > MAX_GAP_S
                ):
                    self.hand_out(self.take_rows())
        return step

    def _process_model_outputs(self, step: ScheduledStep, output: ModelRunnerOutput) -> None:
        if step.prefills:
            step.execute_time = self._step_records.execute_time(step)
        self.scheduler.update_from_output(step, output, self.rows)
        self._step_records.end(step, self.rows.now, self.scheduler.counters)
        if self._log_steps:
            log_step(step, output, self.scheduler, self._step_records)
        if self.tracer is not None:
            self.tracer.processed(step, output, self._step_records.last_times())

    def post_step(self, model_executed: bool) -> None:
        """Runs after each step, when its outputs are on their way."""
        if model_executed and self.check_every_step:
            self.scheduler.check_integrity()
        if self.kv_events is not None:
            self.publish_kv_events()
        if self.scheduler.unused_adapters:
            self.loras.free_unused()
        if self.pausing.waits:
            self.pausing.settle()
        if self.tracer is not None:
            self.tracer.settle()

    def publish_kv_events(self) -> None:
        """Sends what has changed in the prefix cache to those who watch it."""
        if self.kv_events is not None:
            self.kv_events.publish(self.scheduler.take_kv_events())

    def execute_dummy_batch(self) -> None:
        """Runs the model on no data, so that ranks without work stay in step with the others."""
        self.drain()
        self.executor.execute_dummy_batch()

    # ------------------------------------------------------------ utilities

    def answer_utility(
        self, call: UtilityCall, client_index: int, answer: Callable[[UtilityResult], None]
    ) -> None:
        """See utilities.answer_utility."""
        utilities.answer_utility(self, call, client_index, answer)

    def call_utility(self, method: str, args: list[Any], client_index: int = 0) -> Any:
        """See utilities.call_utility."""
        return utilities.call_utility(self, method, args, client_index)

    def ping(self) -> str:
        """An answer between two steps."""
        return "pong"

    def beat(self) -> str:
        """An answer at once; an engine in its own process gives it in another thread."""
        return BEAT

    def scheduler_state(self) -> dict[str, Any]:
        """The waiting, running and swapped requests in plain values, for people and tests."""
        return describe_state(self)

    def observe(self, since_step: int = -1, max_blocks: int = 4096) -> dict[str, Any]:
        """See observation.observe; "counters": get_metrics(), "adapters": Loras.status()."""
        return observe(self.scheduler, self.gate, self._step_records, since_step, max_blocks) | {
            "counters": self.get_metrics(),
            "adapters": self.loras.status(),
        }

    def get_metrics(self) -> dict[str, int]:
        """All gauges and counters by name; ipc/counters.py has their texts."""
        return msgspec.structs.asdict(self.scheduler.stats()) | self.host_counters()

    def status(self) -> dict[str, Any]:
        """What a metrics page shows in addition to get_metrics(), in little time.

        "asleep": what sleeps. "num_held": requests held by a pause, part of num_waiting.
        "step_tokens": see StepRecords.step_tokens. "accepted_per_pos": see Scheduler. "experts":
        see expert_load.summary. "memory": sums of Worker.memory_usage. "loras": see Loras.status.
        "waves": see EngineWaves.describe.
        """
        return {
            "asleep": sorted(self.pausing.asleep),
            "num_held": len(self.scheduler.held),
            "step_tokens": self._step_records.step_tokens(),
            "accepted_per_pos": self.scheduler.accepted_per_pos,
            "experts": summary(self.expert_load()),
            "loras": self.loras.status(),
            "memory": self._memory(),
            "waves": {} if self.waves is None else self.waves.describe(),
        }

    def _memory(self) -> dict[str, int]:
        ranks = self.executor.collective_rpc("memory_usage")
        return {name: sum(rank[name] for rank in ranks) for name in ranks[0]} if ranks else {}

    def expert_load(self) -> dict[str, Any]:
        """See expert_load.by_layer."""
        return by_layer(self.executor.collective_rpc("expert_load"))

    def start_trace(self, num_steps: int = 1, *, client_index: int = 0) -> None:
        """Records the next `num_steps` steps (ipc/trace.py), for this client, until `end_trace`."""
        check_num_steps(num_steps)
        if self.tracer is not None:
            raise InvalidParameterError("trace", "is being recorded already: end it first")
        self.executor.start_trace(num_steps)
        self.tracer = StepTracer(self, client_index, num_steps)

    def wait_for_trace(self) -> Future[int]:
        """Returns when all steps of the trace are recorded, or it has ended: their number."""
        if self.tracer is None:
            raise InvalidParameterError("trace", "is not being recorded: start it first")
        return self.tracer.wait()

    def end_trace(self, *, client_index: int = 0) -> EngineTrace:
        """Ends the trace that this client started; returns the steps that were recorded, which
        may be fewer than it asked for.
        """
        if self.tracer is None or self.tracer.client_index != client_index:
            raise InvalidParameterError("trace", "is not being recorded: start it first")
        return self._drop_trace()

    def _drop_trace(self) -> EngineTrace:
        assert self.tracer is not None
        tracer, self.tracer = self.tracer, None
        tracer.settle(is_over=True)
        return tracer.result(self.executor.end_trace())

    def check_integrity(self) -> bool:
        """Returns True, or raises AssertionError naming what is inconsistent."""
        self.scheduler.check_integrity()
        self.gate.check_integrity(self.scheduler.requests)
        if self.loras.is_enabled:
            self.loras.check_integrity()
        return True

    def shutdown(self) -> None:
        """Releases the model. May be called twice."""
        try:
            self.pausing.keep_for_next_start()
        finally:
            self.executor.shutdown()
        if self.kv_events is not None:
            self.kv_events.close()
