"""MPClient: an engine in another process, a child of this one or a daemon that others use too; for
blocking code and for asyncio.

Must not know: text, torch, core; what a request is for.

No thread of its own: blocking calls poll the output socket and the engine's pidfd; in asyncio the
loop watches both.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import zmq

from ...ipc import messages as m
from ...ipc.config import EngineConfig
from ...ipc.connection import Connection
from ...ipc.errors import EngineDeadError, EnginePausedError
from ...ipc.failures import unpack_exception
from ...ipc.handshake import (
    LAST_WORDS_S,
    Report,
    open_connection,
    open_connection_async,
    report_nothing,
)
from ...ipc.sockets import receive
from ...ipc.threads import in_thread
from .client import CLOSED, EngineClient
from .guard import Guard

if TYPE_CHECKING:  # 6 MB and 30 ms, which blocking programs need not pay
    import asyncio

# read ahead of the caller; then they stay in the socket, and the engine notices
# (ipc/engine_output.py)
MAX_QUEUED_OUTPUTS = 256


class MPClient(EngineClient):
    """See EngineClient. `engine` is "process" or a daemon's address."""

    def __init__(
        self,
        config: EngineConfig,
        engine: str = "process",
        *,
        asyncio_mode: bool = False,
        epoch: int = 0,
        engine_index: int = 0,
        command: Sequence[str] | None = None,
        on_progress: Report = report_nothing,
        connected: tuple[Connection, m.Ready] | None = None,
    ):
        """Starts or attaches, and returns when the engine is ready.

        Raises the engine's own exception if it cannot start,
        EngineStartError if it dies or takes longer than startup_timeout_s.

        `asyncio_mode`: get_output, which would stop the loop, is refused. `engine_index` numbers
        the engines that one frontend uses at the same time, `epoch` those that replace each other;
        both come back in every output of an engine started here.
        `command` starts another program than our engine (see engine_proc.main). `on_progress(stage,
        fraction)` hears how far the engine is. `connected`: this has been done already (see
        `start`).
        """
        self._connection, self.ready = connected or open_connection(
            config,
            engine,
            on_progress,
            epoch=epoch,
            engine_index=engine_index,
            command=command,
        )
        self._guard = Guard()
        # also at exit, for scripts that forget
        self._close = weakref.finalize(self, self._connection.close)
        self.asyncio_mode = asyncio_mode
        self.is_shared = engine != "process"
        self._outputs: deque[m.EngineCoreOutputs] = deque()
        self._results: dict[int, m.UtilityResult] = {}
        # pending calls; a Future for those of asyncio
        self._calls: dict[int, asyncio.Future | None] = {}
        self._num_calls = 0
        # We have paused the engine ourselves, or put it to sleep: who then waits for outputs in
        # blocking code might wait for himself. When another client has done it, it is that client's
        # to undo, and waiting for it is right.
        self._may_be_stalled = False
        self._output_waiter: asyncio.Future | None = None
        self._death: str | None = None  # why the engine is gone
        self._last_words: str | None = None  # its EngineDead
        self._poller = zmq.Poller()
        self._poller.register(self._connection.pull, zmq.POLLIN)
        self._poller.register(self._connection.pidfd, zmq.POLLIN)
        self._poller.register(self._connection.wake_fd, zmq.POLLIN)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        engine: str = "process",
        on_progress: Report = report_nothing,
        *,
        epoch: int = 0,
        engine_index: int = 0,
        command: Sequence[str] | None = None,
    ) -> MPClient:
        """A client in asyncio_mode, made while the running loop goes on; `on_progress(stage,
        fraction)` hears how far the engine is.

        Cancelled, it ends a child before it raises.
        """
        connected = await open_connection_async(
            config,
            engine,
            on_progress,
            epoch=epoch,
            engine_index=engine_index,
            command=command,
        )
        return cls(config, engine, asyncio_mode=True, connected=connected)

    @property
    def num_bad_frames(self) -> int:
        return self._connection.num_bad_frames

    # ------------------------------------------------------------ what both modes use

    def add_request(self, request: m.EngineCoreRequest) -> None:
        self._send(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(m.AbortRequests(request_ids))

    def pace_outputs(self, rows_per_s: int) -> None:
        self._send(m.PaceOutputs(rows_per_s))

    def shutdown(self) -> None:
        if self._guard.is_in_fork:
            return  # the engine is the parent's
        self._leave()
        self._guard.close(self._close, CLOSED)

    async def shutdown_async(self) -> None:
        if self._guard.is_in_fork:
            return
        self._leave()
        await in_thread(lambda: self._guard.close(self._close, CLOSED))

    def _leave(self) -> None:
        """Ends every wait, also that of another thread, and the loop's watching."""
        if self._death is None:
            self._fail_waiters(CLOSED)
            self._connection.wake()

    def _send(self, message: m.ClientMessage) -> None:
        self._raise_if_dead()
        with self._guard:
            self._send_now(message)

    def _send_now(self, message: m.ClientMessage) -> None:
        try:
            self._connection.send(message)
        except zmq.ZMQError as error:  # no peer: the engine has died, or has cut the connection
            if zmq.select([self._connection.pidfd], [], [], LAST_WORDS_S)[0]:
                self._on_death()
            else:
                self._fail_waiters(f"the connection to the engine is lost ({error})")
            self._raise_if_dead()

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def _read(self, everything: bool = False) -> None:
        """Takes in what the socket holds; leaves outputs there while enough are queued and nobody
        waits for what may be behind them.
        """
        while everything or self._wants_more():
            frames = receive(self._connection.pull)
            if frames is None:
                break
            message = self._connection.decode(frames)
            if isinstance(message, m.EngineCoreOutputs):
                self._outputs.append(message)
            elif isinstance(message, m.UtilityResult):
                self._on_result(message)
            elif isinstance(message, m.EngineDead):
                self._last_words = message.cause
        waiter = self._output_waiter
        if self._outputs and waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _wants_more(self) -> bool:
        return bool(self._calls) or len(self._outputs) < MAX_QUEUED_OUTPUTS

    def _on_result(self, message: m.UtilityResult) -> None:
        if message.call_id not in self._calls:
            return  # its caller was cancelled
        waiter = self._calls.pop(message.call_id)
        if waiter is None:
            self._results[message.call_id] = message
        elif not waiter.done():
            waiter.set_result(message)

    def _on_death(self) -> None:
        """The engine is gone: reads what it still said, then fails every waiter."""
        deadline = time.monotonic() + LAST_WORDS_S
        while self._last_words is None and self._connection.pull.poll(
            max(0, int((deadline - time.monotonic()) * 1000))
        ):
            self._read(everything=True)
        death = self._connection.describe_death()
        self._fail_waiters(f"{self._last_words} ({death})" if self._last_words else death)

    def _fail_waiters(self, cause: str) -> None:
        self._death = cause
        self._connection.stop_watching()
        for waiter in (self._output_waiter, *self._calls.values()):
            if waiter is not None and not waiter.done():
                waiter.set_exception(EngineDeadError(cause))
        self._output_waiter = None
        self._calls.clear()

    @staticmethod
    def _result_of(message: m.UtilityResult) -> Any:
        if message.failure is not None:
            raise unpack_exception(message.failure, RuntimeError)
        return message.result

    def _begin_call(self, method: str, args: tuple, waiter: asyncio.Future | None) -> int:
        self._num_calls += 1
        self._may_be_stalled |= method in ("pause", "sleep")
        self._send(m.UtilityCall(self._num_calls, method, list(args)))
        self._calls[self._num_calls] = waiter
        return self._num_calls

    # ------------------------------------------------------------ blocking

    def _wait(self) -> None:
        """Blocks until something was read, the engine has died, or another thread has closed us."""
        ready = dict(self._poller.poll())
        if self._death is not None:
            return  # the callers raise it
        if self._connection.pidfd in ready:
            self._on_death()
        else:
            self._read()

    def get_output(self) -> m.EngineCoreOutputs:
        if self.asyncio_mode:
            raise RuntimeError(
                "this client belongs to an asyncio loop: await get_output_async() instead"
            )
        with self._guard:
            if not self._outputs:
                self._raise_if_dead()
                self._read()
            while not self._outputs:
                self._raise_if_dead()
                if not self._may_be_stalled:
                    self._wait()
                elif (stall := self.call_utility("stall_reason")) is None:
                    self._may_be_stalled = False
                elif not self._outputs:
                    raise EnginePausedError(stall)
            return self._outputs.popleft()

    def call_utility(self, method: str, *args: Any) -> Any:
        with self._guard:
            call_id = self._begin_call(method, args, None)
            try:
                while call_id not in self._results:
                    self._raise_if_dead()
                    self._wait()
                return self._result_of(self._results.pop(call_id))
            finally:
                self._calls.pop(call_id, None)

    # ------------------------------------------------------------ asyncio

    def _watch(self) -> None:
        """Lets the running loop watch the output socket and the engine's life."""
        import asyncio

        loop = asyncio.get_running_loop()
        if self._connection.loop is not loop:
            this = weakref.ref(self)  # the loop must not keep a forgotten client alive
            self._connection.watch(
                loop,
                lambda: (client := this()) and client._on_readable(),
                lambda: (client := this()) and client._on_death(),
            )
        # ZMQ's descriptor tells of changes only, not of what lies there already
        self._on_readable()

    def _on_readable(self) -> None:
        """ZMQ's descriptor tells of a change once, and asking for EVENTS takes the news from it:
        what EVENTS then says must be acted upon. It must be asked, or the loop would call us again
        at once, for ever, where _read stopped early.
        """
        self._read()
        while self._connection.pull.get(zmq.EVENTS) & zmq.POLLIN and self._wants_more():
            self._read()

    async def get_output_async(self) -> m.EngineCoreOutputs:
        self._guard.check_process()
        while not self._outputs:
            self._raise_if_dead()
            self._watch()
            if self._outputs:
                break
            self._output_waiter = self._connection.loop.create_future()
            try:
                await self._output_waiter
            finally:
                self._output_waiter = None
        return self._outputs.popleft()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        import asyncio

        waiter = asyncio.get_running_loop().create_future()
        call_id = self._begin_call(method, args, waiter)
        self._watch()
        try:
            return self._result_of(await waiter)
        finally:
            self._calls.pop(call_id, None)
