"""InprocClient: an engine in this process. Pulling an output is a step; in asyncio a worker thread
does the stepping.

Must not know: text, sockets, the scheduler.

    blocking: get_output ── step, step, … until there are rows                      (the caller's thread owns the core)
    asyncio:  add, abort, call ──▶ inbox ──▶ thread: step ──▶ outputs ──▶ get_output_async     (the worker thread owns it)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec

from ...ipc import messages as m
from ...ipc.codec import BadFrameError, Decoder, Encoder, in_words, whose
from ...ipc.config import EngineConfig
from ...ipc.errors import EngineDeadError, EnginePausedError
from ...ipc.failures import unpack_exception
from ...ipc.handshake import Report
from ...ipc.threads import in_thread
from .client import CLOSED, EngineClient
from .guard import Guard

MAX_QUEUED_OUTPUTS = 256  # the thread steps this far ahead of its reader
CLIENT = 0  # our index in the core


class StartCancelled(Exception):
    """Ends the making of an engine that nobody waits for any more."""


class LocalEngine:
    """The core, its outputs, and the thread that steps it once there is one.

    Does not know the client, which may be collected.
    """

    def __init__(self, core: Any):
        self.core = core
        self.outputs: deque[m.EngineCoreOutputs] = deque()
        self.death: EngineDeadError | None = None
        self.num_bad_frames = 0  # of requests that did not survive the codec
        self.calls: set[Future] = set()  # utility calls whose results are yet to come
        self.waiter: asyncio.Future | None = None  # of the one task that waits for outputs
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._owner_pid = os.getpid()

    def submit(self, function: Callable[[], None]) -> None:
        """Runs `function` on the core between two steps: now, or in the thread that owns it."""
        if self.death is not None:
            raise self.death
        if self._thread is None:
            function()
        else:
            self._inbox.put(function)

    def hand_out(self, outputs: dict[int, m.EngineCoreOutputs] | None) -> None:
        if outputs and CLIENT in outputs:
            self.outputs.append(outputs[CLIENT])
            self._notify()

    def step(self) -> None:
        """One step; its outputs are appended.

        Raises EngineDeadError if it fails: the engine is then dead.
        """
        # a grammar is being checked, in a thread and a process of its own
        if not self.core.has_work() and self.core.gate:
            self.core.gate.wait()
        with self._fatal():
            outputs, model_executed = self.core.step_fn()
            self.hand_out(outputs)
            self.core.post_step(model_executed)

    @contextlib.contextmanager
    def _fatal(self) -> Iterator[None]:
        """Nothing survives an exception in here, and whoever waits for anything is told."""
        try:
            yield
        except Exception as error:
            self.hand_out(self.core.take_rows())
            self.death = EngineDeadError(f"the engine failed: {type(error).__name__}: {error}")
            self.death.__cause__ = error
            self._fail_calls()
            raise self.death from error

    def begin_call(self, call: m.UtilityCall, receive: Callable[[m.UtilityResult], Any]) -> Future:
        """Calls a utility on the core; the Future gets what `receive` makes of the answer, now or
        after a later step.
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
        return msgspec.structs.asdict(m.TransportStats(self.num_bad_frames))

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
        """The reader has taken everything: the thread may go on, if it waited for that."""
        self._inbox.put(lambda: None)

    def wake_thread(self) -> None:
        """There is news for the core.

        Called from any thread; without one of ours, the caller's next step finds the news itself.
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
            pass  # told below, and by every later call
        finally:
            self._take(block=False)  # calls that wait for a dead engine learn of it
            self._notify()

    def _can_step(self) -> bool:
        return self.core.has_work() and len(self.outputs) < MAX_QUEUED_OUTPUTS

    def _take(self, block: bool) -> None:
        try:
            while True:
                self._inbox.get(block)()
                block = False
        except queue.Empty:
            pass

    def _notify(self) -> None:
        waiter = self.waiter
        if waiter is None or not (self.outputs or self.death):
            return
        try:
            waiter.get_loop().call_soon_threadsafe(_resolve, waiter)
        except RuntimeError:  # the loop was closed with its task still waiting
            self.waiter = None

    def close(self, cause: str = CLOSED) -> None:
        """Ends the thread after its present step, and lets go of the model. May be called twice.

        In a fork it does nothing: threads do not survive a fork, and cannot be joined there.
        """
        if self._is_closing or os.getpid() != self._owner_pid:
            return
        self._is_closing = True
        self.death = self.death or EngineDeadError(cause)
        if self._thread is not None:
            self.wake()
            # it is when the thread dropped the last reference to the client
            if self._thread is not threading.current_thread():
                self._thread.join()
        self._fail_calls()
        self.core.shutdown()


def _resolve(waiter: asyncio.Future) -> None:
    if not waiter.done():
        waiter.set_result(None)


class InprocClient(EngineClient):
    """See EngineClient.

    Errors are those of the other forms: the engine's own at start, EngineDeadError after a failed
    step.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: Any = None,
        round_trip: bool = False,
        report: Report | None = None,
    ):
        """`executor` takes the place of the real one.

        `round_trip` sends every message through the codec and back: for tests, which must not pass
        on objects that the wire could not carry. `report(stage, fraction)` hears how far the engine
        is; what it raises ends it.
        """
        from ...core.engine_core import EngineCore

        self._engine = engine = LocalEngine(EngineCore(config, executor, report))
        engine.core.host_counters = engine.count_transport
        engine.core.hand_out = engine.hand_out
        engine.core.gate.wake = engine.wake_thread
        self._guard = Guard()
        self._close = weakref.finalize(self, engine.close)  # also at exit, for scripts that forget
        self.ready = engine.core.ready
        max_message_bytes = config.service_config.max_message_bytes
        self._encoder = Encoder(max_message_bytes) if round_trip else None
        self._to_engine = Decoder(m.ClientMessage, max_message_bytes)
        self._to_client = Decoder(m.EngineMessage, max_message_bytes)

    @classmethod
    async def start(
        cls, config: EngineConfig, on_progress: Report, *, executor: Any = None
    ) -> InprocClient:
        """A client whose engine is made in a thread while the running loop goes on.

        Cancelled, it gives up at the engine's next report.
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
        """The request as the engine receives it; None if it did not survive and was answered, as
        ipc/engine_input.py does it.
        """
        if self._encoder is None:
            return request
        frames = self._encoder.encode(request)
        try:
            return self._to_engine.decode(frames)
        except BadFrameError as error:
            self._engine.num_bad_frames += 1
            finished = [m.Finished(0, m.FinishReason.ERROR, error=in_words(error, frames))]
            refusal = m.EngineCoreOutputs(
                self.ready.epoch,
                [whose(frames)],
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
            raise RuntimeError(
                "this client belongs to an asyncio loop: await get_output_async() instead"
            )
        with self._guard:
            while not engine.outputs:
                if engine.death is not None:
                    raise engine.death
                if engine.core.is_idle():
                    # there is no other client that could change it
                    if stall := engine.core.pausing.describe_stall():
                        raise EnginePausedError(stall)
                    raise RuntimeError(
                        "no request of this client is unfinished: there is nothing to wait for"
                    )
                # raised in the next turn, behind the rows that came before it
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
                engine.step()  # the result comes with a step, and nobody else makes one
        return future.result()

    def _begin_call(self, method: str, args: tuple) -> Future:
        call = m.UtilityCall(0, method, list(args))
        if self._encoder is not None:
            call = self._to_engine.decode(self._encoder.encode(call))
        return self._engine.begin_call(call, self._receive)

    def _receive(self, message: m.UtilityResult) -> Any:
        if self._encoder is not None:
            message = self._to_client.decode(self._encoder.encode(message))
        if message.failure is not None:
            raise unpack_exception(message.failure, RuntimeError)
        return message.result

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
                # asked again: the thread may have looked for a waiter just before
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
            return  # the engine is the parent's
        # ends a call of another thread after its present step
        self._engine.death = self._engine.death or EngineDeadError(CLOSED)
        self._guard.close(self._close, CLOSED)
