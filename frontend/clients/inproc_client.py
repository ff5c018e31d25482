"""InprocClient: an engine in this process. In blocking code the caller steps it; in asyncio a
worker thread does.

Must not know: text, sockets, the scheduler.

    blocking: get_output ── step, step, … until there are rows
              (the caller's thread owns the core)
    asyncio:  add, abort, call ──▶ inbox ──▶ thread: step ──▶ outputs ──▶ get_output_async
              (the worker thread owns the core)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec

from ...ipc import messages as m
from ...ipc.codec import BadFrameError, Decoder, Encoder, readable_error
from ...ipc.config import EngineConfig
from ...ipc.counters import TransportStats
from ...ipc.errors import EngineDeadError, EnginePausedError
from ...ipc.handshake import Report
from ...ipc.threads import in_thread
from .client import CLOSED, OF_A_LOOP, EngineClient, result_of
from .guard import Guard
from .journal import Journal

MAX_QUEUED_OUTPUTS = 256  # the thread runs at most this many outputs ahead of its reader
CLIENT = 0  # this client's index in the core


class StartCancelled(Exception):
    """Stops the start of an engine after a cancellation."""


class LocalEngine:
    """The core, its outputs, and the worker thread if it has been started.

    Holds no reference to the client, so that the client can be garbage-collected.
    """

    def __init__(self, config: EngineConfig, executor: Any, report: Report | None):
        from ...core.engine_core import EngineCore, Host

        self.outputs: deque[m.EngineCoreOutputs] = deque()
        self.death: EngineDeadError | None = None
        self.num_bad_frames = 0  # requests that could not be encoded or decoded
        self.calls: set[Future] = set()  # utility calls without a result so far
        self.waiter: asyncio.Future | None = None  # set by the one task that waits for outputs
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._owner_pid = os.getpid()
        host = Host(
            deliver=self.deliver, wake=self.wake_thread, count_transport=self.count_transport
        )
        self.core = EngineCore(config, executor, report, host=host)

    def submit(self, function: Callable[[], None]) -> None:
        """Runs `function` on the core between two steps: now, or in the thread that owns it."""
        if self.death is not None:
            raise self.death
        if self._thread is None:
            function()
        else:
            self._inbox.put(function)

    def deliver(self, outputs: dict[int, m.EngineCoreOutputs] | None) -> None:
        if outputs and CLIENT in outputs:
            self.outputs.append(outputs[CLIENT])
            self._notify()

    def step(self) -> None:
        """Runs one step and appends its outputs.

        Raises EngineDeadError if the step fails; the engine is then dead.
        """
        # a grammar is being compiled, or an adapter read, in another thread
        if not self.core.has_work():
            self.core.wait()
        with self._fatal():
            outputs, model_executed = self.core.step_fn()
            self.deliver(outputs)
            self.core.post_step(model_executed)

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """Marks the engine as dead after an exception and fails every waiting call."""
        try:
            yield
        except Exception as error:
            self.deliver(self.core.take_rows())
            self.death = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
            self.death.__cause__ = error
            self._fail_calls()
            raise self.death from error

    def begin_call(self, call: m.UtilityCall, receive: Callable[[m.UtilityResult], Any]) -> Future:
        """Calls a utility on the core. The Future gets the value of `receive(answer)`, now or after
        a later step.
        """
        future: Future = Future()

        def finish(result: m.UtilityResult) -> None:
            self.calls.discard(future)
            try:
                future.set_result(receive(result))
            except Exception as error:
                future.set_exception(error)

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            if self.death is not None:
                future.set_exception(self.death)
                return
            self.calls.add(future)
            with self._fatal():
                self.core.answer_utility(call, CLIENT, finish)

        self.submit(run)
        return future

    def count_transport(self) -> dict[str, int]:
        return msgspec.structs.asdict(TransportStats(self.num_bad_frames))

    def _fail_calls(self) -> None:
        while self.calls:
            self.calls.pop().set_exception(self.death)

    # ------------------------------------------------------------ the thread

    @property
    def has_thread(self) -> bool:
        return self._thread is not None

    def start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Resumes the thread if it waits because the reader had not taken its outputs."""
        self._inbox.put(lambda: None)

    def wake_thread(self) -> None:
        """Notifies the worker thread of new work for the core.

        Called from any thread. Without a worker thread, the caller's next step finds the work
        itself.
        """
        if self._thread is not None:
            self.wake()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._take(block=not self._can_step())
                if self._can_step() and not self._is_closing:
                    self.step()
        except EngineDeadError:
            pass  # reported below, and by every later call
        finally:
            self._take(block=False)  # fails the calls that wait for a dead engine
            self._notify()

    def _can_step(self) -> bool:
        return self.core.has_work() and len(self.outputs) < MAX_QUEUED_OUTPUTS

    def _take(self, block: bool) -> None:
        """Runs what waits in the inbox. `block`: waits for it, until the next deadline of a
        request.
        """
        deadline = self.core.next_deadline if block else None
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            while True:
                self._inbox.get(block, timeout_s)()
                block = False
        except queue.Empty:
            pass

    def _notify(self) -> None:
        waiter = self.waiter
        if waiter is None or not (self.outputs or self.death):
            return
        try:
            waiter.get_loop().call_soon_threadsafe(_resolve, waiter)
        except RuntimeError:  # the loop was closed while its task was waiting
            self.waiter = None

    def close(self, cause: str = CLOSED) -> None:
        """Ends the thread after its present step and releases the model. May be called twice.

        In a fork it does nothing, because threads do not survive a fork and cannot be joined.
        """
        if self._is_closing or os.getpid() != self._owner_pid:
            return
        self._is_closing = True
        self.death = self.death or EngineDeadError(cause)
        if self._thread is not None:
            self.wake()
            # true if the thread dropped the last reference to the client
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._fail_calls()
        self.core.shutdown()


def _resolve(waiter: asyncio.Future) -> None:
    if not waiter.done():
        waiter.set_result(None)


class InprocClient(EngineClient):
    """Implements EngineClient for an engine in this process.

    Errors are the same as in the other implementations: the engine's own at start, EngineDeadError
    after a failed step.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: Any = None,
        round_trip: bool = False,
        report: Report | None = None,
        journal: Journal | None = None,
    ):
        """Makes the engine and waits until it is ready.

        executor: replaces the default executor. round_trip: encodes and decodes every message, so
        that tests cannot pass objects that the wire could not carry. report: called with (stage,
        fraction) during the start; an exception from it cancels the start.
        """
        self._engine = engine = LocalEngine(config, executor, report)
        self.journal = Journal() if journal is None else journal
        self._guard = Guard()
        # also runs at exit, for scripts that do not call shutdown
        self._close = weakref.finalize(self, engine.close)
        self.ready = engine.core.ready
        max_message_bytes = config.service_config.max_message_bytes
        self._encoder = Encoder(max_message_bytes) if round_trip else None
        self._to_engine = Decoder(m.ClientMessage, max_message_bytes)
        self._to_client = Decoder(m.EngineMessage, max_message_bytes)

    @classmethod
    async def start(
        cls, config: EngineConfig, on_progress: Report, *, executor: Any = None
    ) -> InprocClient:
        """Returns a client whose engine is made in a thread, without blocking the running loop.

        If cancelled, it stops at the engine's next progress report.
        """
        loop, is_cancelled = asyncio.get_running_loop(), threading.Event()

        def tell(stage: str, fraction: float) -> None:
            if not is_cancelled.is_set():
                on_progress(stage, fraction)

        def report(stage: str, fraction: float) -> None:
            if is_cancelled.is_set():
                raise StartCancelled
            loop.call_soon_threadsafe(tell, stage, fraction)

        return await in_thread(
            lambda: cls(config, executor=executor, report=report),
            on_cancel=is_cancelled.set,
            discard=cls.shutdown,
        )

    # ------------------------------------------------------------ requests

    def add_request(self, request: m.EngineCoreRequest) -> None:
        core = self._engine.core
        with self._guard:
            received = self._carry(request)
            if received is not None:
                self._engine.submit(lambda: core.add_request(received, CLIENT))

    def abort_requests(self, request_ids: list[str]) -> None:
        core = self._engine.core
        if request_ids:
            with self._guard:
                self._engine.submit(lambda: core.abort_requests(request_ids, CLIENT))

    def pace_outputs(self, rows_per_s: int) -> None:
        core = self._engine.core
        with self._guard:
            self._engine.submit(lambda: core.pace_outputs(rows_per_s, CLIENT))

    def _carry(self, request: m.EngineCoreRequest) -> m.EngineCoreRequest | None:
        """Returns the request as the engine receives it. If it cannot be decoded, appends an error
        row, as ipc/engine_input.py does, and returns None.
        """
        if self._encoder is None:
            return request
        frames = self._encoder.encode(request)
        try:
            return self._to_engine.decode(frames)
        except BadFrameError as error:
            self._engine.num_bad_frames += 1
            finished = [m.Finished(0, m.FinishReason.ERROR, error=readable_error(error, frames))]
            refusal = m.EngineCoreOutputs(
                self.ready.epoch,
                [request.request_id],
                [0],
                [0],
                [],
                finished,
                engine_index=self.ready.engine_index,
            )
            self._engine.submit(lambda: self._engine.outputs.append(refusal))
            return None

    def _deliver(self) -> m.EngineCoreOutputs:
        outputs = self._engine.outputs.popleft()
        return (
            outputs
            if self._encoder is None
            else self._to_client.decode(self._encoder.encode(outputs))
        )

    # ------------------------------------------------------------ blocking

    def get_output(self) -> m.EngineCoreOutputs:
        engine = self._engine
        if engine.has_thread:
            raise RuntimeError(OF_A_LOOP)
        with self._guard:
            while not engine.outputs:
                if engine.death is not None:
                    raise engine.death
                if engine.core.is_idle():
                    # no other client can resume it
                    if stall := engine.core.pausing.describe_stall():
                        raise EnginePausedError(stall)
                    raise RuntimeError(
                        "no request of this client is unfinished: there is nothing to wait for"
                    )
                # raised by the next call, after the rows that precede it
                with contextlib.suppress(EngineDeadError):
                    engine.step()
            return self._deliver()

    def call_utility(self, method: str, *args: Any) -> Any:
        engine = self._engine
        with self._guard:
            future = self._begin_call(method, args)
            while not engine.has_thread and not future.done():
                if engine.death is not None:
                    raise engine.death
                engine.step()  # the result arrives with a step, and only this thread makes steps
        return future.result()

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        core = self._engine.core
        worker = getattr(
            core.executor, "worker", None
        )  # else the ranks have processes of their own
        if worker is None or self._engine.has_thread:
            return super().apply_model(function)
        with self._guard:
            if self._engine.death is not None:
                raise self._engine.death
            core.drain()
            return [function(worker.model)]

    def _begin_call(self, method: str, args: tuple) -> Future:
        call = m.UtilityCall(0, method, list(args))
        if self._encoder is not None:
            call = self._to_engine.decode(self._encoder.encode(call))
        return self._engine.begin_call(call, self._receive)

    def _receive(self, message: m.UtilityResult) -> Any:
        if self._encoder is not None:
            message = self._to_client.decode(self._encoder.encode(message))
        return result_of(message)

    # ------------------------------------------------------------ asyncio

    async def get_output_async(self) -> m.EngineCoreOutputs:
        self._guard.check_process()
        engine = self._engine
        engine.start_thread()
        while not engine.outputs:
            if engine.death is not None:
                raise engine.death
            engine.waiter = waiter = asyncio.get_running_loop().create_future()
            try:
                # checked again: the thread may have looked for a waiter just before
                if not engine.outputs and engine.death is None:
                    await waiter
            finally:
                engine.waiter = None
        outputs = self._deliver()
        if not engine.outputs:  # the thread may have stopped because it was too far ahead
            engine.wake()
        return outputs

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self._guard.check_process()
        self._engine.start_thread()
        return await asyncio.wrap_future(self._begin_call(method, args))

    def shutdown(self) -> None:
        if self._guard.is_in_fork:
            return  # the engine belongs to the parent process
        # ends a call of another thread after its present step
        self._engine.death = self._engine.death or EngineDeadError(CLOSED)
        self._guard.close(self._close, CLOSED)
