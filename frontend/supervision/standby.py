"""Standby keeps a second engine process, idle, that takes the place of one that dies.

Must not know: requests, the engine in use, who waits, what its process has loaded.

    prepare ─▶ start ─▶ load the weights that clients have set ─▶ ready ─▶ take
                 ▲                        │ it died                │ it died
                 └────────────────────────┴────────────────────────┘

A thread starts engines and watches the one that is ready.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
from collections.abc import Sequence

from ...ipc.config import EngineConfig
from ...ipc.errors import NotEnoughMemoryError, QuireError
from ...ipc.machine import free_memory_bytes, private_memory_bytes
from ...ipc.process import WakePipe, readable
from ...ipc.threads import in_thread
from ..clients.journal import Journal
from ..clients.mp_client import MPClient
from .engine_state import NO_WEIGHTS, Weights
from .restart_budget import RestartBudget
from .standby_engines import StandbyEngine, start_standby

logger = logging.getLogger("quire.supervision")


def check_memory(engine: MPClient) -> None:
    """Raises NotEnoughMemoryError if a second engine on a CPU would not fit beside this one. On a
    GPU a standby has nothing of an engine's size.

    The KV cache counts once, because that of a standby is not touched until the other engine is
    gone.
    """
    if engine.ready.config.device_config.device != "cpu":
        return
    needed = private_memory_bytes(engine.engine_pid) + engine.ready.kv_cache_bytes
    free = free_memory_bytes()
    if needed > free:
        raise NotEnoughMemoryError(
            "standby",
            f"the weights of a second engine process and the KV cache of the first take {needed} "
            f"bytes, {free} bytes are free; a lower kv_cache_memory_bytes leaves more",
        )


class Standby:
    """command, journal: as in MPClient.

    A standby that dies is replaced as often, and with the same delays, as an engine in use.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str], journal: Journal):
        self._config, self._command, self._journal = config, command, journal
        self._budget = RestartBudget(config.service_config.engine_restarts)
        self._changed = threading.Condition()  # guards what follows
        self._epoch: int | None = None  # of the standby; None: none is wanted
        self._weights = NO_WEIGHTS  # that it must have
        self._ready: StandbyEngine | None = None
        self._ready_weights = NO_WEIGHTS
        self._is_closed = self._is_draining = False
        self._starting: tuple[asyncio.AbstractEventLoop, asyncio.Task] | None = None
        self._changes = WakePipe()
        self._thread: threading.Thread | None = None
        self._owner_pid = os.getpid()

    @property
    def is_ready(self) -> bool:
        return self._ready is not None

    def begin_drain(self) -> None:
        """Ensures that no standby is started from now on. One that is ready may still take over."""
        self._is_draining = True

    def prepare(self, epoch: int) -> None:
        """Starts a standby, which will be engine number `epoch`, in the background."""
        with self._changed:
            if self._is_closed or self._is_draining or self._epoch is not None:
                return
            self._epoch = epoch
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="quire-standby", daemon=True)
                self._thread.start()
            self._wake()

    def set_weights(self, weights: Weights) -> None:
        """Notes that the engine in use has other weights now."""
        with self._changed:
            self._weights = weights
            self._wake()

    async def take(self) -> StandbyEngine | None:
        """Returns the standby once it is ready, or None if there is none, or it fails."""
        return await in_thread(
            self._take,
            on_cancel=self.begin_close,
            discard=lambda taken: None if taken is None else taken.shutdown(),
        )

    def _take(self) -> StandbyEngine | None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready is not None or self._epoch is None or self._is_closed
            )
            engine, self._ready, self._epoch = self._ready, None, None
            self._wake()
            if engine is None or self._is_closed or _is_dead(engine):
                if engine is not None:
                    engine.shutdown()
                return None
            self._budget.note_progress()
            return engine

    def close(self) -> None:
        """Ends the standby. May be called twice; does nothing in a fork."""
        if os.getpid() != self._owner_pid:
            return
        self.begin_close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._changes.close()

    def begin_close(self) -> None:
        """Does what `close` does, without waiting."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            if self._starting is not None:
                loop, task = self._starting
                loop.call_soon_threadsafe(task.cancel)
            self._wake()

    def _wake(self) -> None:
        self._changes.wake()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        delay_s = 0.0
        while not self._is_closed:
            with self._changed:
                epoch, engine, weights = self._epoch, self._ready, self._weights
            try:
                if epoch is None:
                    self._sleep(None)
                elif engine is None:
                    if delay_s:
                        self._sleep(delay_s)
                    engine = self._start(epoch)
                    engine.load(weights)
                    self._offer(engine, weights)
                elif weights != self._ready_weights:
                    if self._withdraw(engine):
                        engine.load(weights)
                        self._offer(engine, weights)
                elif self._sleep(None, engine) and self._withdraw(engine):
                    raise QuireError(engine.describe_death())
            except QuireError as error:
                if engine is not None:
                    engine.shutdown()
                delay_s = self._next_delay(error)
        with self._changed:
            engine, self._ready = self._ready, None
        if engine is not None:
            engine.shutdown()

    def _sleep(self, seconds: float | None, engine: StandbyEngine | None = None) -> bool:
        """Waits for a change. Returns whether `engine` is dead."""
        poller = select.poll()
        poller.register(self._changes.read_fd, select.POLLIN)
        if engine is not None:
            poller.register(engine.pidfd, select.POLLIN)
        ready = [fd for fd, _ in poller.poll(None if seconds is None else 1000 * seconds)]
        if self._changes.read_fd in ready:
            self._changes.read()
        return engine is not None and engine.pidfd in ready

    def _start(self, epoch: int) -> StandbyEngine:
        """Starts an engine. Raises QuireError if it does not start, or `close` is called
        meanwhile.
        """

        async def start() -> StandbyEngine:
            task = asyncio.current_task()
            assert task is not None
            with self._changed:
                if self._is_closed:
                    raise QuireError("closed")
                self._starting = asyncio.get_running_loop(), task
            try:
                return await start_standby(self._config, self._command, self._journal, epoch)
            finally:
                with self._changed:
                    self._starting = None

        try:
            return asyncio.run(start())
        except asyncio.CancelledError:
            raise QuireError("closed") from None

    def _offer(self, engine: StandbyEngine, weights: Weights) -> None:
        with self._changed:
            self._ready, self._ready_weights = engine, weights
            self._changed.notify_all()

    def _withdraw(self, engine: StandbyEngine) -> bool:
        """Returns whether the engine has not been taken, so that this thread may use it again."""
        with self._changed:
            is_here = self._ready is engine
            if is_here:
                self._ready = None
            return is_here

    def _next_delay(self, error: QuireError) -> float:
        """Returns, after a standby has died or failed, the seconds until the next, if there will be
        one.
        """
        with self._changed:
            if self._is_closed:
                return 0.0
            delay_s = None if self._is_draining else self._budget.take()
            if delay_s is not None:
                logger.error("the standby failed: %s; starting another in %g s", error, delay_s)
                return delay_s
            level = logging.INFO if self._is_draining else logging.ERROR
            logger.log(level, "the standby failed: %s; there will be no other", error)
            self._is_closed = True
            self._changed.notify_all()
            return 0.0


def _is_dead(engine: StandbyEngine) -> bool:
    return bool(readable(engine.pidfd, timeout_s=0))
