"""ModelSlot: one model of a server that has several. It starts its engine, lets it sleep, ends it,
and counts its users.

Must not know: other models, memory beyond this model's plan, HTTP beyond the errors that it raises.

    unloaded ──▶ loading ──▶ ready ──▶ leaving ──▶ sleeping ──▶ loading (woken)
        ▲           │                     │            │
        └───────────┴─── failed           └────────────┴──▶ unloaded

Only a slot without users leaves. What a slot holds of the memory is planned, not measured. It is
its needs while it loads or is ready, and the engine's process alone while it sleeps.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal

import msgspec

from ...ipc.config import EngineConfig
from ...ipc.errors import QuireError
from ...ipc.log_format import announce, name_model
from ..async_llm import AsyncLLM
from ..engine_args import EngineArgs
from ..model_info.plan import Plan
from .http.errors import ENDS, ApiError
from .state import ServerState

logger = logging.getLogger(__name__)
tell = functools.partial(announce, logger, "quire serve")
SlotPhase = Literal["unloaded", "loading", "ready", "leaving", "sleeping"]
StartEngine = Callable[..., Awaitable[AsyncLLM]]  # as AsyncLLM.start
DEATH_WAIT_S = 10.0  # for the requests of a dead engine to receive their errors


class Needs(msgspec.Struct, frozen=True):
    """The memory of one model in bytes, as planned."""

    weights_bytes: int
    kv_cache_bytes: int
    runtime_bytes: int  # of the engine's process; what a sleeping engine holds

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.runtime_bytes


class ModelSlot:
    """How a model's engine is started, its engine if there is one, and its users.

    `state` is what the routes of this model receive; its engine comes and goes.
    """

    def __init__(
        self,
        args: EngineArgs,
        state: ServerState,
        config: EngineConfig,
        plan: Plan,
        has_chat_template: bool = True,
    ):
        self.name = state.model_name
        self.args = args
        self.state = state
        self.config = config  # as far as it is known without the engine
        self.plan = plan
        self.has_chat_template = has_chat_template
        self.needs = Needs(
            plan.weights_bytes, plan.kv_cache_bytes * plan.num_engines, plan.runtime_bytes
        )
        self.phase: SlotPhase = "unloaded"
        self.is_asleep = False  # the engine's process is there, its weights and cache are not
        self.has_loaded = False  # once
        self.is_removed = False  # its files are deleted; nobody uses it any more
        self.num_users = 0  # requests that use the engine or wait until it is ready
        self.last_used = 0.0  # time.monotonic()
        # A request may ask for this time after the last use. Negative means for ever; with None the
        # server's applies.
        self.keep_alive_s: float | None = None
        self.idle = asyncio.Event()  # set while there are no users
        self.idle.set()
        self.coming: asyncio.Task[None] | None = None  # makes the engine ready
        self.leaving: asyncio.Task[None] | None = None  # ends the engine, or lets it sleep
        # Another model waits for this one's memory while it is set: new users wait until it is
        # resolved.
        self.wanted: asyncio.Future[None] | None = None
        self.unloads_at: float | None = None  # seconds since 1970; None: not planned
        self._timers: list[asyncio.TimerHandle] = []

    @property
    def held_bytes(self) -> int:
        if self.phase == "unloaded":
            return 0
        return self.needs.runtime_bytes if self.is_asleep else self.needs.total_bytes

    @property
    def is_in_memory(self) -> bool:
        return self.phase in ("ready", "sleeping")

    # ------------------------------------------------------------ users

    def begin_use(self) -> None:
        self.num_users += 1
        self.idle.clear()
        self.clear_timers()
        self.last_used = time.monotonic()

    def end_use(self, keep_alive_s: float | None = None) -> None:
        """Ends one use. From now on `keep_alive_s` is the slot's, in place of the server's."""
        self.num_users -= 1
        self.last_used = time.monotonic()
        if keep_alive_s is not None:
            self.keep_alive_s = keep_alive_s
        if self.num_users:
            return
        self.idle.set()
        if self.coming is not None and self.phase != "loading":
            self.coming.cancel()  # it waits for memory that nobody needs any more
            self.coming = None

    def end_early(self) -> asyncio.Task[None] | None:
        """Ends the engine, now or when its users are done. Returns the task that ends it."""
        self.keep_alive_s = 0.0
        return self.leave(unload=True) if not self.num_users and self.is_in_memory else None

    def remove(self) -> asyncio.Task[None] | None:
        """Makes the slot one that nobody uses. Returns the task that ends its engine."""
        self.is_removed = True
        self.clear_timers()
        return self.leave(unload=True) if self.is_in_memory else None

    # ------------------------------------------------------------ coming

    def bring(self, come: Callable[[ModelSlot], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Returns the task that makes the slot ready. All requests that wait for it share it."""
        if self.coming is None:
            context = contextvars.copy_context()
            context.run(name_model, self.name)  # the engine's process and its tasks log it
            loop = asyncio.get_running_loop()
            self.coming = loop.create_task(come(self), context=context)
            # A failure that nobody waits for any more is not an error of the loop.
            self.coming.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self.coming

    def end_coming(self, task: asyncio.Task[Any] | None) -> None:
        """Notes the end of the task that `bring` made. Another may have taken its place."""
        if self.coming is task:
            self.coming = None

    def take_memory(self) -> bool:
        """Makes the slot hold its memory from here on. Returns whether its engine is asleep."""
        was_asleep, self.is_asleep, self.phase = self.is_asleep, False, "loading"
        return was_asleep

    async def load(self, start: StartEngine, *, was_asleep: bool) -> None:
        """Starts or wakes the engine. A failure leaves the slot unloaded, for the next attempt."""
        began = time.monotonic()
        engine, loading = self.state.engine, self.state.begin_loading()
        try:
            if was_asleep and engine is not None:
                await engine.call_utility("wake_up", None)
            else:
                engine = await start(self.args, "process", loading.report)
                await self.state.adopt_engine(engine)
        except BaseException as error:
            self.state.clear_engine()
            self.phase = "unloaded"
            if engine is not None:
                await engine.shutdown_async()
            if isinstance(error, ENDS):
                raise
            loading.error = str(error)
            unexpected = None if isinstance(error, QuireError) else error
            logger.error("%s could not be loaded: %s", self.name, error, exc_info=unexpected)
            cause = str(error) if unexpected is None else "the server's log has the cause"
            message = f"The model {self.name!r} could not be loaded: {cause}"
            raise ApiError(503, message, code="model_load_failed") from error
        finally:
            self.state.end_loading()
        self.phase, self.has_loaded = "ready", True
        verb = "awake" if was_asleep else "ready"
        tell(f"{verb}: {self.name}, after {time.monotonic() - began:.1f} s")

    # ------------------------------------------------------------ leaving

    def clear_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.unloads_at = None

    def plan_departure(self, keep_alive_s: float, sleep_after_s: float | None) -> None:
        """Sets the times at which the slot sleeps and ends. It is called when the slot has become
        idle. Both arguments are the server's; if `sleep_after_s` is None, it is half of the other.
        """
        self.clear_timers()
        keep_alive_s = keep_alive_s if self.keep_alive_s is None else self.keep_alive_s
        if not self.is_in_memory or keep_alive_s < 0:
            return
        if keep_alive_s == 0:
            self.leave(unload=True)
            return
        loop = asyncio.get_running_loop()
        sleep_after_s = keep_alive_s / 2 if sleep_after_s is None else sleep_after_s
        if 0 <= sleep_after_s < keep_alive_s and self.phase == "ready":
            self._timers.append(loop.call_later(sleep_after_s, self._leave_if_idle, False))
        self._timers.append(loop.call_later(keep_alive_s, self._leave_if_idle, True))
        self.unloads_at = self.state.now() + keep_alive_s

    def _leave_if_idle(self, unload: bool) -> None:
        is_there = self.phase == "ready" or (unload and self.phase == "sleeping")
        if self.num_users == 0 and is_there:
            self.leave(unload=unload)
        elif unload and self.leaving is not None:  # it is falling asleep: look again afterwards
            self.leaving.add_done_callback(lambda _: self._leave_if_idle(True))

    def leave_for(self, missing_bytes: int) -> asyncio.Task[None]:
        """Lets an idle engine sleep if that frees enough for another model, or ends it."""
        saved_bytes = self.held_bytes - self.needs.runtime_bytes
        return self.leave(unload=saved_bytes < missing_bytes)

    async def leave_when_idle(self, missing_bytes: int) -> None:
        """Waits until the users that the slot has now are done; new ones wait. Then it leaves for
        another model.
        """
        self.wanted = asyncio.get_running_loop().create_future()
        try:
            await self.idle.wait()
            if self.coming is not None:  # its users left while it was loading
                await asyncio.wait([self.coming])
            if self.phase == "ready":
                self.leave_for(missing_bytes)
        finally:
            self.wanted.set_result(None)
            self.wanted = None

    def leave(self, *, unload: bool) -> asyncio.Task[None]:
        """Lets an idle engine sleep, or ends it. New users wait until that is done."""
        return self._begin_leaving(self._sleep_or_end(unload))

    def _begin_leaving(self, end: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.phase = "leaving"
        self.leaving = asyncio.get_running_loop().create_task(end)
        return self.leaving

    async def _sleep_or_end(self, unload: bool) -> None:
        engine, began = self.state.engine, time.monotonic()
        try:
            if engine is not None and not unload:
                try:
                    await engine.call_utility("sleep", 2)
                    self.phase, self.is_asleep = "sleeping", True
                    tell(f"asleep: {self.name}, after {time.monotonic() - began:.1f} s")
                    return
                except QuireError as error:
                    logger.error("%s could not sleep: %s", self.name, error)
            self.clear_timers()
            self.keep_alive_s = None
            self.state.clear_engine()
            if engine is not None:
                await engine.shutdown_async()
            self.phase, self.is_asleep = "unloaded", False
            tell(f"unloaded: {self.name}, after {time.monotonic() - began:.1f} s")
        finally:
            self.leaving = None

    def note_death(self) -> None:
        """Makes room after an engine has died. The engine is started on its next use."""
        engine = self.state.engine
        if self.is_in_memory and engine is not None and engine.errored:
            logger.error("%s: %s", self.name, engine.dead_error)
            self._begin_leaving(self._end_dead_engine())

    async def _end_dead_engine(self) -> None:
        try:
            async with asyncio.timeout(DEATH_WAIT_S):
                await self.idle.wait()
        except TimeoutError:
            logger.warning("%s: its requests did not end with their engine", self.name)
        await self._sleep_or_end(unload=True)

    # ------------------------------------------------------------ the end of the server

    async def drain(self) -> None:
        self.clear_timers()
        if (coming := self.coming) is not None:
            coming.cancel()
            await asyncio.wait([coming])

    async def shutdown(self) -> None:
        """Ends the engine. Its requests receive an error."""
        if self.leaving is not None:
            await asyncio.wait([self.leaving])
        if self.state.engine is not None:
            await self.state.engine.shutdown_async()
