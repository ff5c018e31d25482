"""MPClient is the client of an engine in a child process, or of a daemon shared with other clients.

Must not know: text, torch, core, the purpose of a request.

The event loop watches the output socket and the engine's pidfd. Blocking code uses it through a
BlockingClient.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from ...ipc import messages as m
from ...ipc.config import EngineConfig
from ...ipc.connection import Connection
from ...ipc.errors import EngineDeadError
from ...ipc.handshake import LAST_MESSAGES_S, Report, open_connection, report_nothing
from ...ipc.hops import MessageTimer
from ...ipc.process import STACKS_SIGNAL, readable
from ...ipc.sockets import has_message, receive
from ...ipc.threads import in_thread
from .client import CLOSED, EngineClient, result_of
from .guard import Owner
from .journal import Journal
from .watchdog import CHECK_INTERVAL_S, Step, Watchdog

# At most so many outputs are read ahead of the caller. Further ones stay in the socket, which
# limits the engine (ipc/engine_output.py).
MAX_QUEUED_OUTPUTS = 256
ARRIVAL_S = 0.005  # for what a dead engine has sent and this process not yet read
CHECK_CALL_ID = 0  # of the watchdog's calls; those of others begin at 1
# These calls may take longer than a step.
SLOW_UTILITIES = frozenset({"load_weights", "sleep", "wake_up", "collective_rpc"})

logger = logging.getLogger("quire.client")


class MPClient(EngineClient):
    """Implements EngineClient for an engine in another process. `engine` is "process" or a daemon's
    address.
    """

    def __init__(
        self,
        config: EngineConfig,
        connection: Connection,
        ready: m.Ready,
        *,
        is_shared: bool = False,
        journal: Journal | None = None,
        on_wave: Callable[[m.WaveReport], None] = lambda report: None,
    ):
        """connection, ready: what open_connection returns. is_shared: the engine is a daemon.
        journal: the session's; if it is None, the client makes one. on_wave: is called with what an
        engine that shares experts reports.
        """
        self._connection = connection
        self.ready = ready
        self.is_shared = is_shared
        self.journal = Journal() if journal is None else journal
        self._on_wave = on_wave
        self._owner = Owner()
        # It also runs at exit, for scripts that do not call shutdown.
        self._close = weakref.finalize(
            self, connection.close, config.service_config.shutdown_timeout_s
        )
        self._outputs: deque[m.EngineCoreOutputs] = deque()
        self._calls: dict[int, asyncio.Future] = {}
        self._num_calls = 0
        self._num_outputs = 0  # received
        self._output_waiter: asyncio.Future | None = None
        self._death: str | None = None  # the reason why the engine is gone
        self._last_words: str | None = None  # the text of the engine's EngineDead message
        self.was_hung = False  # the watchdog has ended the engine
        # A daemon has made room for another client; nothing that this one has sent since is done.
        self.was_released = False
        self._message_timer: MessageTimer | None = None  # while steps are traced
        self._watchdog: Watchdog | None = None  # of a child
        if not is_shared:
            self._watchdog = Watchdog(config.service_config.step_timeout_s)
        self._num_rejected_peers = 0  # that the watchdog knows of
        self._slow_calls: set[int] = set()  # pending ones that may take longer than a step
        self._check_timer: asyncio.TimerHandle | None = None

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
        waiting: Connection | None = None,
        journal: Journal | None = None,
    ) -> MPClient:
        """Starts an engine or attaches to one. Returns when it is ready.

        Raises the engine's own exception if it cannot start, and EngineStartError if it dies or
        takes longer than startup_timeout_s. If cancelled, it ends a child before it raises.

        on_progress: is called with (stage, fraction) during the start. engine_index: numbers the
        engines that one frontend uses at the same time. epoch: numbers the engines that replace
        each other. Every output of an engine started here carries both. command: starts another
        program instead of the engine (see engine_proc.main). waiting: see open_connection.
        """
        connection, ready = await open_connection(
            config,
            engine,
            on_progress,
            epoch=epoch,
            engine_index=engine_index,
            command=command,
            waiting=waiting,
        )
        return cls(config, connection, ready, is_shared=engine != "process", journal=journal)

    @property
    def num_bad_frames(self) -> int:
        return self._connection.num_bad_frames

    @property
    def num_rejected_peers(self) -> int:
        return self._connection.num_rejected_peers

    @property
    def engine_pid(self) -> int:
        return self._connection.engine_pid

    @property
    def pidfd(self) -> int:
        """Returns a descriptor that is readable when the engine is gone."""
        return self._connection.pidfd

    def describe_death(self) -> str:
        """Returns how a dead engine died, as far as this process can tell."""
        return self._connection.describe_death()

    @property
    def exit_signal(self) -> signal.Signals | None:
        """Returns the signal that ended a child engine, or None for a daemon and for an engine that
        ended in another way.
        """
        is_dead = not self.is_shared and self._death is None and readable(self.pidfd, timeout_s=0)
        return self._connection.reap() if is_dead else self._connection.exit_signal

    # ------------------------------------------------------------ requests

    def add_request(self, request: m.EngineCoreRequest) -> None:
        self._send(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        if request_ids:
            self._send(m.AbortRequests(request_ids))

    def pace_outputs(self, rows_per_s: int) -> None:
        self._send(m.PaceOutputs(rows_per_s))

    def start_wave(self, number: int) -> None:
        """See StartWave."""
        self._raise_if_dead()
        self._send_now(m.StartWave(number))

    def shutdown(self) -> None:
        if not self._owner.is_in_fork:  # else the engine belongs to the parent process
            self._end_waits()
            self._close()

    async def shutdown_async(self) -> None:
        if not self._owner.is_in_fork:
            self._end_waits()
            await in_thread(self._close)

    def _end_waits(self) -> None:
        if self._death is None:
            self._fail_waiters(CLOSED)

    def _send(self, message: m.ClientMessage) -> None:
        self._owner.check_process()
        self._raise_if_dead()
        self._send_now(message)
        if self._connection.loop is not None:
            self._check_later(self._connection.loop)

    def _send_now(self, message: m.ClientMessage) -> None:
        try:
            self._connection.send(message)
        except zmq.ZMQError as error:
            self._on_lost(error)
            self._raise_if_dead()

    def _on_lost(self, error: zmq.ZMQError) -> None:
        """Fails the waiting calls: the engine has died, or has closed its sockets, as one that
        fails does some time before it ends.
        """
        if readable(self._connection.pidfd, timeout_s=LAST_MESSAGES_S):
            return self._on_death()
        self._read(everything=True)
        self._fail_waiters(self._last_words or f"the connection to the engine is lost ({error})")

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)

    def _read(self, everything: bool = False) -> None:
        """Reads outputs from the socket. Leaves them there while enough are queued and no call
        waits for a later message.

        ZMQ's descriptor becomes readable once per change, and asking for a message resets it, so
        whatever there is must be read here. It must be asked even where no more are wanted;
        otherwise an event loop would call this method again without end.
        """
        pull = self._connection.pull
        while (
            has_message(pull)
            and (everything or self._wants_more())
            and (frames := receive(pull)) is not None
        ):
            message = self._connection.decode(frames)
            if isinstance(message, m.EngineCoreOutputs):
                if message.number < self._num_outputs:  # it has been here before
                    self._connection.count_bad_frame()
                    continue
                if message.number > self._num_outputs:
                    return self._end("messages of the engine were lost on their way")
                self._num_outputs += 1
                self._heard()
                self._outputs.append(message)
            elif isinstance(message, m.UtilityResult):
                self._on_result(message)
            elif isinstance(message, m.WaveReport):
                self._on_wave(message)
            elif isinstance(message, m.EngineDead):
                self._last_words = message.cause
        waiter = self._output_waiter
        if self._outputs and waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _wants_more(self) -> bool:
        return bool(self._calls) or len(self._outputs) < MAX_QUEUED_OUTPUTS

    def _on_result(self, message: m.UtilityResult) -> None:
        if message.call_id == CHECK_CALL_ID:
            return self._heard()
        self._slow_calls.discard(message.call_id)
        if message.call_id not in self._calls:
            return  # its caller was cancelled
        if not (waiter := self._calls.pop(message.call_id)).done():
            waiter.set_result(message)

    def _on_death(self) -> None:
        """Reads the last messages of an engine that is gone, then fails the waiting calls."""
        if (cause := self._connection.release_reason()) is not None:
            self.was_released = True
            return self._fail_waiters(cause)
        is_silent = self._connection.reap() is not None  # a signal leaves no time for words
        deadline = time.monotonic() + (ARRIVAL_S if is_silent else LAST_MESSAGES_S)
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

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self._num_calls += 1
        call_id = self._num_calls
        if method == "start_trace":
            self._time_messages()
        self._send(m.UtilityCall(call_id, method, list(args)))
        self._calls[call_id] = waiter = asyncio.get_running_loop().create_future()
        if method in SLOW_UTILITIES:
            self._slow_calls.add(call_id)
        self._watch()
        try:
            return self._result_of(method, await waiter)
        finally:
            self._calls.pop(call_id, None)

    def _time_messages(self) -> None:
        """Times messages until the answer to end_trace. An earlier trace continues."""
        if self._message_timer is None:
            self._message_timer = MessageTimer(self._connection.codec)
            self._message_timer.start()

    def _result_of(self, method: str, message: m.UtilityResult) -> Any:
        """Returns the message's result or raises its exception. It adds the hops of this client's
        messages to a trace.
        """
        result = result_of(message)
        if method != "end_trace" or self._message_timer is None:
            return result
        timer, self._message_timer = self._message_timer, None
        return timer.add_hops(result)

    # ------------------------------------------------------------ the watchdog

    def _heard(self) -> None:
        if self._watchdog is not None:
            self._watchdog.heard()

    def _check_progress(self) -> None:
        """Asks the engine whether it still finishes steps, and ends it if it has not for too
        long.
        """
        watchdog, process = self._watchdog, self._connection.process
        assert watchdog is not None and process is not None
        # Outputs that nobody has taken show that their reader is late, not the engine.
        if self._slow_calls or (self._outputs and not self._calls):
            return watchdog.heard()
        if (number := self.num_rejected_peers) != self._num_rejected_peers:
            # A peer was rejected, or a message of the engine was changed and ZMQ reads no more of
            # them.
            self._num_rejected_peers = number
            watchdog.doubt()
            self._send_now(m.UtilityCall(CHECK_CALL_ID, m.BEAT))
        match watchdog.check():
            case Step.ASK:
                self._send_now(m.UtilityCall(CHECK_CALL_ID, "ping"))
            case Step.SHOW_STACKS:
                logger.error(
                    "the engine process (pid %d) has not finished a step for %g s; the stacks of "
                    "its threads follow, if it can still write them, and then it is ended",
                    self.engine_pid,
                    watchdog.timeout_s,
                )
                process.send_signal(STACKS_SIGNAL)
            case Step.END:
                self._end(
                    "the engine was not heard any more after a peer of its sockets was rejected"
                    if watchdog.is_in_doubt
                    else f"the engine did not finish a step for {watchdog.timeout_s:g} s "
                    f"(step_timeout_s)"
                )

    def _end(self, cause: str) -> None:
        """Ends a child. A daemon counts as dead."""
        self.was_hung = True
        if self._connection.process is None:
            return self._fail_waiters(cause)
        self._last_words = cause
        self._connection.process.send_signal(signal.SIGKILL)

    def _check_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._watchdog is None or self._check_timer is not None:
            return
        this = weakref.ref(self)
        self._check_timer = loop.call_later(
            CHECK_INTERVAL_S, lambda: (client := this()) and client._on_check_timer(loop)
        )

    def _on_check_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Checks while there is work. The next message that is sent starts the checks again."""
        self._check_timer = None
        if self._death is None and (self._calls or self.journal):
            with contextlib.suppress(EngineDeadError):  # which the waiting calls raise
                self._check_progress()
            self._check_later(loop)

    # ------------------------------------------------------------ outputs

    def _watch(self) -> asyncio.AbstractEventLoop:
        """Makes the running loop watch the output socket and the pidfd. Returns the loop."""
        loop = asyncio.get_running_loop()
        if self._connection.loop is not loop:
            self._check_timer = None  # of another loop
            this = weakref.ref(self)  # the loop must not keep an unused client alive
            self._connection.watch(
                loop,
                lambda: (client := this()) and client._read(),
                lambda: (client := this()) and client._on_death(),
            )
        self._check_later(loop)
        # ZMQ's descriptor reports changes only, not messages that have already arrived.
        self._read()
        return loop

    async def get_output_async(self) -> m.EngineCoreOutputs:
        self._owner.check_process()
        while not self._outputs:
            self._raise_if_dead()
            loop = self._watch()
            if self._outputs:
                break
            self._output_waiter = loop.create_future()
            try:
                await self._output_waiter
            finally:
                self._output_waiter = None
        return self._outputs.popleft()
