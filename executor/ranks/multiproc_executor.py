"""An executor over several ranks, which are processes of their own.

Must not know: the scheduler, requests, what a rank computes, how ranks are started, what carries
messages (local_ranks.py).

All ranks get the same commands. A thread reads their replies and notices deaths.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import msgspec

from ...ipc.block_offload import Beginning
from ...ipc.codec import MessageDecoder, MessageEncoder
from ...ipc.config import EngineConfig
from ...ipc.failures import unpack_exception
from ...ipc.lora import LoRARequest
from ...ipc.messages import Failed
from ...ipc.models.ranks import check_ranks, num_ranks
from ...ipc.params import StructuredOutputsParams
from ...ipc.step_messages import ModelRunnerOutput, PreemptionCosts, SchedulerOutput
from ...ipc.trace import RanksTrace
from .local_ranks import LocalRanks
from .measuring import open_swap_space, share_pass_times
from .messages import (
    MAX_MESSAGE_BYTES,
    Answer,
    Call,
    CheckGrammar,
    Command,
    Configure,
    EndFetch,
    Fetch,
    Kept,
    Leave,
    Loading,
    MoveBlocks,
    OffloadOpened,
    RankLostError,
    ReadLora,
    Reply,
    Result,
    Sampled,
    Step,
    StepDone,
    Trace,
)
from .offload import RanksOffload
from .ring import join_frames, split_frames
from .rounds import PendingRanks, Rounds, Then

# A call that fails on one rank fails on the others too, or they wait for that rank.
GRACE_S = 10.0
# A rank that has lost another one does not know why; what watches ranks does, a little later.
LOST_GRACE_S = 3.0
LEAVE_TIMEOUT_S = 1.0


class Ranks(Protocol):
    """The ranks of an engine, which were started: how they are reached, and whether they live."""

    @property
    def names(self) -> Sequence[str]:
        """The name of each rank in messages, as "rank 0 of 2"."""
        ...

    def send(self, message: bytes) -> None:
        """Sends a message to every rank. One thread calls it at a time. Raises InterruptedError
        after `interrupt`, where it would wait for a rank.
        """
        ...

    def read(
        self, on_message: Callable[[int, bytes], None], on_death: Callable[[str], None]
    ) -> None:
        """Calls on_message(rank, reply) for every reply, and on_death(cause) when a rank is gone,
        until `stop`. It runs in a thread of its own.
        """
        ...

    def interrupt(self) -> None:
        """Makes `send` wait no longer, because a rank has failed. Thread-safe."""
        ...

    def stop(self) -> None:
        """Ends `read`. Thread-safe."""
        ...

    def end(self, timeout_s: float) -> None:
        """Ends the ranks, which have so long to leave. Called once, after `read` has returned."""
        ...


class MultiprocExecutor:
    """Implements Executor (executor/executor.py)."""

    def __init__(self, config: EngineConfig, start: Callable[[EngineConfig], Ranks] = LocalRanks):
        """`config` is resolved. Raises InvalidParameterError for what ranks or their machine cannot
        do, after they were ended.
        """
        check_ranks(config)
        self.config = config
        self.size = size = num_ranks(config)
        self.kv_cache_windows: tuple[int, ...] = (0,)
        self.burst_weights_bytes = 0
        self.num_state_checkpoints: int | None = None
        self.max_num_seqs = config.scheduler_config.max_num_seqs
        device = config.device_config
        self._has_stages = device.pipeline_parallel_size > 1
        self._first_sampling = size - device.tensor_parallel_size  # in the last stage
        # steps and moves of blocks, the oldest first
        self._running: deque[PendingRanks] = deque()
        # of an engine whose steps may have several passes, which each go round the stages
        self._rounds: Rounds | None = None
        if self._has_stages and config.scheduler_config.speculative_config is None:
            self._rounds = Rounds(self._submit, self._finish_oldest)
        self._offload: RanksOffload | None = None
        self._sampled: list[Sampled] = []  # what was not sent to the ranks yet
        self._encoder = MessageEncoder(MAX_MESSAGE_BYTES)
        self._decoders = [MessageDecoder(Reply, MAX_MESSAGE_BYTES) for _ in range(size)]
        # what ranks do beside steps: number -> the values of those that have answered, future
        self._asked: dict[int, tuple[dict[int, str], Future[Any]]] = {}
        self._num_asked = 0
        self._report: Callable[[str, float], None] = _report_nothing
        # guards what the reading thread writes: replies, checks and the failure
        self._arrived = threading.Condition()
        self._replies: list[deque[Any]] = [deque() for _ in range(size)]
        self._progress: list[Loading] = []
        self._failure: str | None = None  # why no step can run any more
        self._on_failure: Callable[[str], None] | None = None
        self._is_shut_down = False
        self.ranks = start(config)
        self._thread = threading.Thread(
            target=self.ranks.read,
            args=(self._on_message, self._fail),
            name="quire-ranks",
            daemon=True,
        )
        self._thread.start()
        try:
            self._send(Configure(config))
            self._collect()
        except BaseException:
            self.shutdown()
            raise

    # ------------------------------------------------------------ the interface

    def load_model(self, report: Callable[[str, float], None]) -> None:
        """See Executor. The progress is that of the first rank."""
        self._report = report
        windows, *_ = self._call("load_model")  # those of all ranks are equal
        self.kv_cache_windows = tuple(windows)

    def determine_num_blocks(self) -> int:
        """See Executor: what the rank with the least memory has room for."""
        return min(self._call("determine_num_blocks"))

    def initialize_kv_cache(self, num_blocks: int) -> int:
        """Allocates each rank's part; returns the bytes of all."""
        parts = self._call("initialize_kv_cache", num_blocks)
        sizes, weights_bytes, max_num_seqs, checkpoints = zip(*parts, strict=True)
        self.burst_weights_bytes, self.max_num_seqs = min(weights_bytes), min(max_num_seqs)
        rooms = [room for room in checkpoints if room is not None]  # a stage may keep no states
        self.num_state_checkpoints = min(rooms, default=None)
        share_pass_times(self._call, self.config)
        return sum(sizes)

    def initialize_swap_space(self) -> tuple[int, PreemptionCosts]:
        """See Executor. Each rank keeps its parts of the blocks."""
        return open_swap_space(self._call, self.config)

    def initialize_offload(self) -> RanksOffload | None:
        """See Executor."""
        if self.config.cache_config.kv_offloading_size:
            opened: list[OffloadOpened] = self._ask(Call("initialize_offload"))
            self._offload = RanksOffload(self, opened, self.config.cache_config)
        return self._offload

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """See Executor."""
        with self._arrived:
            self._on_failure = on_failure
            failure = self._failure
        if failure is not None:
            on_failure(failure)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Runs one step on all ranks.

        Raises RuntimeError, naming the rank and the cause, if one fails, dies, or has other tokens
        than the others.
        """
        return self.submit_model(scheduler_output).result()

    def submit_model(self, scheduler_output: SchedulerOutput) -> PendingRanks:
        """See Executor. Each stage begins a step as soon as it has finished the previous one."""
        if self._rounds is not None:
            return self._rounds.submit(scheduler_output)
        return self._submit(scheduler_output, lambda take: take())

    def _submit(self, step: SchedulerOutput, then: Then) -> PendingRanks:
        """Begins a step, or a pass of one; `then` gets what takes its output."""
        self._send(Step(step, self._sampled))
        self._sampled = []
        pending = PendingRanks(self._finish_oldest, lambda: then(self._take_output))
        self._running.append(pending)
        return pending

    def _finish_oldest(self) -> None:
        """Waits for the oldest step, or move of blocks, that runs."""
        pending = self._running.popleft()
        try:
            pending.output.set_result(pending.take())
        except Exception as error:
            pending.output.set_exception(error)

    def ask(self, command: MoveBlocks) -> list[Kept]:
        """See RankCalls."""
        return self._ask(command)

    def submit(self, command: MoveBlocks, on_reply: Callable[[list[Kept]], None]) -> None:
        """See RankCalls. Does nothing where no step can run any more."""

        def take() -> None:
            try:
                on_reply(self._collect())
            except Exception as error:
                self._fail(str(error))  # nobody else looks at it

        with contextlib.suppress(RuntimeError):  # the next command raises it
            self._send(command)
            self._running.append(PendingRanks(self._finish_oldest, take))

    def fetch(self, beginning: Beginning) -> Future[None]:
        """See RankCalls."""
        number, future = self._note_asked()

        def end(done: Future[None]) -> None:
            if done.cancelled():  # by the thread that makes all calls
                with contextlib.suppress(RuntimeError):  # the next command raises it
                    self._send(EndFetch(number))

        future.add_done_callback(end)
        self._send(Fetch.of(number, beginning))
        return future

    def _take_output(self) -> ModelRunnerOutput:
        replies: list[StepDone] = self._collect(grace_s=0.0)
        if self._offload is not None:
            self._offload.note([one.kept for one in replies])
        done = replies[self._first_sampling :]
        digests = [one.digest for one in done]
        if len(set(digests)) > 1:
            # a kernel that is not deterministic, or a user's code that draws random numbers
            self._fail(f"the ranks sampled different tokens (checksums {digests})")
            self._require_alive()
        output = done[0].output
        assert output is not None
        if self._has_stages:
            self._sampled.append(done[0].sampled())
        return output

    def check_grammar(
        self, params: StructuredOutputsParams, *, is_known: bool = False, owner: str = ""
    ) -> Future[None]:
        """See Executor. Every rank compiles it."""
        number, future = self._note_asked()
        self._send(CheckGrammar(number, params, is_known, owner))
        return future

    def read_lora(self, request: LoRARequest) -> Future[str]:
        """See Executor. Every rank reads the files, and keeps its part."""
        number, future = self._note_asked()
        self._send(ReadLora(number, request))
        return future

    def add_lora(self, request: LoRARequest) -> bool:
        """See Executor."""
        return all(self._call("add_lora", request))

    def remove_lora(self, lora_int_id: int) -> bool:
        """See Executor."""
        return all(self._call("remove_lora", lora_int_id))

    def list_loras(self) -> set[int]:
        """See Executor."""
        return set(self._call("list_loras")[0])

    def execute_dummy_batch(self) -> None:
        """See Executor."""
        self._call("execute_dummy_batch")

    def collective_rpc(self, method: str, *args: Any) -> list[Any]:
        """See Executor."""
        return [value for values in self._call("collective_rpc", method, *args) for value in values]

    def join_engines(self) -> None:
        """See SharingExecutor."""
        self._call("join_engines")

    def meet_engines(self, has_work: bool) -> bool:
        """See SharingExecutor. Each rank meets those of the other engines with its number."""
        return any(self._call("meet_engines", has_work))

    def join_pass(self) -> None:
        """See SharingExecutor."""
        self._call("join_pass")

    def start_trace(self, num_steps: int) -> None:
        """See Executor."""
        self._call("start_trace", num_steps)

    def end_trace(self) -> RanksTrace:
        """See Executor. Limits, places and names are those of the first rank."""
        replies: list[Trace] = self._ask(Call("end_trace"))
        return trace_of_all([reply.decode() for reply in replies])

    def check_health(self) -> None:
        """See Executor."""
        self._call("check_health")

    def shutdown(self) -> None:
        """Ends the ranks. May be called twice."""
        if self._is_shut_down:
            return
        self._is_shut_down = True
        timeout_s = LEAVE_TIMEOUT_S
        while self._offload is not None and self._running and self._failure is None:
            self._finish_oldest()  # it may take longer to keep blocks than to leave
        if self._failure is None:
            with contextlib.suppress(RuntimeError):
                self._send(Leave())
        else:  # some wait for a rank that is gone
            timeout_s = 0.0
        with self._arrived:
            self._on_failure = None
            self._failure = self._failure or "the executor was shut down"
        self.ranks.stop()
        self._thread.join()
        self.ranks.end(timeout_s)

    # ------------------------------------------------------------ commands and replies

    def _note_asked(self) -> tuple[int, Future[Any]]:
        """The number of what all ranks are asked to do beside steps, and its future result."""
        future: Future[Any] = Future()
        with self._arrived:
            self._num_asked += 1
            self._asked[self._num_asked] = {}, future
            return self._num_asked, future

    def _send(self, command: Command) -> None:
        self._require_alive()
        try:
            self.ranks.send(join_frames(self._encoder.encode(command)))
        except InterruptedError:
            self._require_alive()
            raise

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method on every rank, and returns the results in rank order."""
        replies: list[Result] = self._ask(Call(method, list(args)))
        return [reply.value for reply in replies]

    def _ask(self, call: Call | MoveBlocks) -> list[Any]:
        """Sends a call once the steps that run have ended, and returns the replies."""
        while self._running:
            self._finish_oldest()
        self._send(call)
        return self._collect()

    def _collect(self, grace_s: float = GRACE_S) -> list[Any]:
        """Waits for the next reply of every rank. Raises the exception that all of them had;
        exceptions of some are the executor's failure.
        """
        replies: list[Any] = [None] * self.size
        deadline: float | None = None
        while True:
            with self._arrived:
                progress = list(self._progress)
                self._progress.clear()
                for rank, queue in enumerate(self._replies):
                    if replies[rank] is None and queue:
                        replies[rank] = queue.popleft()
                failed = [one for one in replies if isinstance(one, Failed)]
                if failed and deadline is None:
                    is_lost = any(one.error_type == RankLostError.__name__ for one in failed)
                    deadline = time.monotonic() + (LOST_GRACE_S if is_lost else grace_s)
                is_late = deadline is not None and time.monotonic() >= deadline
                if None not in replies or is_late or self._failure is not None:
                    break
                if not progress:
                    self._arrived.wait(None if deadline is None else deadline - time.monotonic())
            for one in progress:  # it may raise, and may call this executor
                self._report(one.stage, one.fraction)
        if len(failed) == self.size and len({one.error_type for one in failed}) == 1:
            raise unpack_exception(failed[0], RuntimeError)
        if failed:
            rank = next(i for i, one in enumerate(replies) if isinstance(one, Failed))
            first = replies[rank]
            self._fail(
                f"{self.ranks.names[rank]} failed: {first.error_type}: {first.message}\n"
                f"{first.traceback}"
            )
        if failed or None in replies:
            self._require_alive()
        return replies

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _fail(self, cause: str) -> None:
        """Notes why no step can run any more: the first cause counts. Any thread may call it."""
        with self._arrived:
            if self._failure is not None:
                return
            self._failure = cause
            asked, self._asked = list(self._asked.values()), {}
            on_failure = self._on_failure
            self._arrived.notify_all()
        self.ranks.interrupt()
        for _, future in asked:
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError(cause))
        if on_failure is not None:
            on_failure(cause)

    # ------------------------------------------------------------ the thread

    def _on_message(self, rank: int, message: bytes) -> None:
        reply = self._decoders[rank].decode(split_frames(message))
        if isinstance(reply, Loading):
            if rank == 0:
                with self._arrived:
                    self._progress.append(reply)
                    self._arrived.notify_all()
        elif isinstance(reply, Answer):
            self._on_answer(rank, reply)
        else:
            with self._arrived:
                self._replies[rank].append(reply)
                self._arrived.notify_all()

    def _on_answer(self, rank: int, reply: Answer) -> None:
        """The result is the text of all ranks. The first failure counts."""
        with self._arrived:
            values, future = self._asked.get(reply.number, ({}, None))
            if future is None:
                return
            values[rank] = reply.value
            if reply.failure is None and len(values) < self.size:
                return
            del self._asked[reply.number]
        if not future.set_running_or_notify_cancel():
            return
        if reply.failure is None:
            future.set_result("|".join(values[rank] for rank in range(self.size)))
        else:
            future.set_exception(unpack_exception(reply.failure, RuntimeError))


def trace_of_all(traces: Sequence[RanksTrace]) -> RanksTrace:
    """What several ranks have recorded of the same steps. The rest is the first rank's."""
    steps = {
        step: [rank for trace in traces for rank in trace.steps.get(step, [])]
        for step in traces[0].steps
    }
    notes = list(dict.fromkeys(note for trace in traces for note in trace.notes))
    return msgspec.structs.replace(traces[0], steps=steps, notes=notes)


def _report_nothing(stage: str, fraction: float) -> None:
    pass
