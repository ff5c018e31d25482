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
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from ...ipc import messages as m
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

    It holds no reference to the client, so that the client can be garbage-collected.
    """

    def __init__(self, config: EngineConfig, executor: Any, report: Report | None):
        from ...core.engine_core import EngineCore, Host

        self.outputs: deque[m.EngineCoreOutputs] = deque()
        self.death: EngineDeadError | None = None
        self.calls: set[Future] = set()  # utility calls without a result so far
        self.waiter: asyncio.Future | None = None  # set by the one task that waits for outputs
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self._is_closing = False
        self._owner_pid = os.getpid()
        host = Host(deliver=self.deliver, wake=self.wake_thread, count_transport=_count_transport)
        self.core = EngineCore(config, executor, report, host=host)

    def submit(self, function: Callable[[], None]) -> None:
        """Runs `function` on the core between two steps: now, or in the thread that owns it."""
        if self.death is not None:
            raise self.death
        if self.thread is None:
            function()
        else:
            self._inbox.put(function)

    def deliver(self, outputs: dict[int, m.EngineCoreOutputs] | None) -> None:
        if outputs and CLIENT in outputs:
            self.outputs.append(outputs[CLIENT])
            if self.waiter is not None:
                self._notify()

    def step(self) -> None:
        """Runs one step and appends its outputs. If it fails, the engine is dead."""
        # Another thread compiles a grammar or reads an adapter.
        if not self.core.has_work():
            self.core.wait()
        try:
            outputs, model_executed = self.core.step_fn()
            self.deliver(outputs)
            self.core.post_step(model_executed)
        except Exception as error:
            self._die(error)

    def _die(self, error: Exception) -> None:
        """Fails every waiting call. The rows that precede the failure can still be read."""
        self.deliver(self.core.take_rows())
        self.death = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
        self.death.__cause__ = error
        self._fail_calls()

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
            try:
                self.core.answer_utility(call, CLIENT, finish)
            except Exception as error:
                self._die(error)

        self.submit(run)
        return future

    def _fail_calls(self) -> None:
        while self.calls:
            self.calls.pop().set_exception(self.death)

    # ------------------------------------------------------------ the thread

    def start_thread(self) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
            self.thread.start()

    def wake(self) -> None:
        """Resumes the thread if it waits because the reader had not taken its outputs."""
        self._inbox.put(lambda: None)

    def wake_thread(self) -> None:
        """Notifies the worker thread of new work for the core.

        It may be called from any thread. Without a worker thread, the caller's next step finds the
        work itself.
        """
        if self.thread is not None:
            self.wake()

    def _run(self) -> None:
        try:
            while not self._is_closing and self.death is None:
                self._take(block=not self._can_step())
                if self._can_step() and not self._is_closing and self.death is None:
                    self.step()
        finally:
            self._take(block=False)  # fails the calls that wait for a dead engine
            self._notify()

    def _can_step(self) -> bool:
        return self.core.has_work() and len(self.outputs) < MAX_QUEUED_OUTPUTS

    def _take(self, block: bool) -> None:
        """Runs what waits in the inbox. With `block` it waits for it, until the next deadline of a
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
        if self.thread is not None:
            self.wake()
            # They are the same if the thread dropped the last reference to the client.
            if self.thread is not threading.current_thread():
                self.thread.join()
        self._fail_calls()
        self.core.shutdown()


def _resolve(waiter: asyncio.Future) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _count_transport() -> dict[str, int]:
    return msgspec.structs.asdict(TransportStats())


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
        report: Report | None = None,
        journal: Journal | None = None,
    ):
        """Makes the engine and waits until it is ready.

        executor: replaces the default executor. report: is called with (stage, fraction) during the
        start; an exception from it cancels the start. journal: the session's; if it is None, the
        client makes one.
        """
        self._engine = engine = LocalEngine(config, executor, report)
        self.journal = Journal() if journal is None else journal
        self._guard = Guard()
        # It also runs at exit, for scripts that do not call shutdown.
        self._close = weakref.finalize(self, engine.close)
        self.ready = engine.core.ready

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
        with self._guard:
            self._engine.submit(partial(self._engine.core.add_request, request, CLIENT))

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            with self._guard:
                self._engine.submit(partial(self._engine.core.abort_requests, request_ids, CLIENT))

    def pace_outputs(self, rows_per_s: int) -> None:
        with self._guard:
            self._engine.submit(partial(self._engine.core.pace_outputs, rows_per_s, CLIENT))

    # ------------------------------------------------------------ blocking

    def get_output(self) -> m.EngineCoreOutputs:
        engine = self._engine
        with self._guard:
            while not engine.outputs:
                if engine.death is not None or engine.thread is not None or engine.core.is_idle():
                    raise self._why_no_step()
                engine.step()
            return engine.outputs.popleft()

    def _why_no_step(self) -> Exception:
        engine = self._engine
        if engine.thread is not None:
            return RuntimeError(OF_A_LOOP)
        if engine.death is not None:
            return engine.death
        if stall := engine.core.pausing.describe_stall():  # no other client can resume it
            return EnginePausedError(stall)
        return RuntimeError("no request of this client is unfinished: there is nothing to wait for")

    def call_utility(self, method: str, *args: Any) -> Any:
        engine = self._engine
        with self._guard:
            future = self._begin_call(method, args)
            while engine.thread is None and not future.done():
                if engine.death is not None:
                    raise engine.death
                engine.step()  # the result arrives with a step, and only this thread makes steps
        return future.result()

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        core = self._engine.core
        device = self.ready.config.device_config
        has_ranks = device.tensor_parallel_size * device.pipeline_parallel_size > 1
        if has_ranks or self._engine.thread is not None:  # ranks are processes of their own
            return super().apply_model(function)
        with self._guard:
            if self._engine.death is not None:
                raise self._engine.death
            core.drain()
            worker: Any = core.executor  # there are no ranks
            return [function(worker.model)]

    def _begin_call(self, method: str, args: tuple) -> Future:
        return self._engine.begin_call(m.UtilityCall(0, method, list(args)), result_of)

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
                # It is checked again, because the thread may have looked for a waiter just before.
                if not engine.outputs and engine.death is None:
                    await waiter
            finally:
                engine.waiter = None
        outputs = engine.outputs.popleft()
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
        # This ends a call of another thread after its present step.
        self._engine.death = self._engine.death or EngineDeadError(CLOSED)
        self._guard.close(self._close, CLOSED)
