"""The models of a server that has several: which engines run, who may use them, and when they sleep
or end so that others fit into memory.

Must not know: HTTP beyond the errors that it raises, routes, what a request contains.

A slot's phases:

    unloaded ──▶ loading ──▶ ready ──▶ leaving ──▶ sleeping ──▶ loading (woken)
        ▲           │                     │            │
        └───────────┴─── failed           └────────────┴──▶ unloaded

`acquire` makes a model ready and counts its user; `release` ends the use. Only a slot without users
leaves. What a slot holds of the memory is planned, not measured: its needs while it loads or is
ready, the engine's process alone while it sleeps.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ...ipc.config import EngineConfig
from ...ipc.errors import QuireError
from ...ipc.log_format import announce, name_model
from ...ipc.machine import free_memory_bytes
from ..async_llm import AsyncLLM
from ..engine_args import EngineArgs
from ..model_info.plan import Plan
from .http.errors import ENDS, ENGINE_GONE, ApiError
from .state import Loading, ServerState, shutting_down

logger = logging.getLogger(__name__)
tell = functools.partial(announce, logger, "quire serve")
Phase = Literal["unloaded", "loading", "ready", "leaving", "sleeping"]
RETRY_S = 5.0  # Retry-After where memory may be free soon
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
    """One model: how its engine is started, its engine if there is one, and its users.

    `state`: what the routes of this model receive; its engine comes and goes.
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
        self.phase: Phase = "unloaded"
        self.is_asleep = False  # the engine's process is there, its weights and cache are not
        self.has_loaded = False  # once
        self.is_removed = False  # its files are deleted; nobody uses it any more
        self.shown: dict[str, Any] | None = None  # the answer to /api/show
        self.num_users = 0  # requests that use the engine or wait until it is ready
        self.last_used = 0.0  # time.monotonic()
        self.keep_alive_s = 0.0  # after the last use; negative: for ever
        self.idle = asyncio.Event()  # set while there are no users
        self.idle.set()
        self.coming: asyncio.Task[None] | None = None  # makes the engine ready
        self.leaving: asyncio.Task[None] | None = None  # ends the engine, or lets it sleep
        # Set while another model waits for this one's memory: new users wait until it is resolved.
        self.wanted: asyncio.Future[None] | None = None
        self.timers: list[asyncio.TimerHandle] = []
        self.unloads_at: float | None = None  # seconds since 1970; None: not planned

    @property
    def held_bytes(self) -> int:
        if self.phase == "unloaded":
            return 0
        return self.needs.runtime_bytes if self.is_asleep else self.needs.total_bytes

    def clear_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()
        self.unloads_at = None


@dataclass(frozen=True)
class Downloads:
    """How a model that a client pulls is downloaded and becomes a slot.

    make_slot: gives the slot of a name on the hub whose files are there, planned as one of so many
    models; it blocks, and raises QuireError. revision, download_dir: as in EngineArgs.
    """

    make_slot: Callable[[str, int], ModelSlot]
    revision: str | None = None
    download_dir: str | None = None


class Models:
    """All slots of a server: those of the command line in their order, then the pulled ones.

    default: the slot of requests that name no model. limit_bytes: memory for all engines;
    is_measured: it was measured at start, so memory that others have taken since counts too.
    keep_alive_s, sleep_after_s: idle times after which an engine ends and sleeps; negative: never.
    wait_s: the longest wait of a request for its model. max_waiting: of such requests; further ones
    are refused. on_loaded: called after each load. downloads: None if clients may not pull models.
    at_drain: called when the server begins to end.
    """

    def __init__(
        self,
        slots: Iterable[ModelSlot],
        default: str,
        *,
        limit_bytes: int,
        is_measured: bool = False,
        keep_alive_s: float = 300.0,
        sleep_after_s: float | None = None,
        wait_s: float = 600.0,
        max_waiting: int = 1024,
        unknown_is_default: bool = False,
        on_loaded: Callable[[], None] = lambda: None,
        start: Callable[..., Awaitable[AsyncLLM]] = AsyncLLM.start,
        downloads: Downloads | None = None,
    ):
        self.slots: dict[str, ModelSlot] = {}
        self.keep_alive_s = keep_alive_s
        for slot in slots:
            self.add(slot)
        self.default = self.slots[default]
        self.limit_bytes = limit_bytes
        self.downloads = downloads
        self.at_drain: list[Callable[[], None]] = []
        self.sleep_after_s = sleep_after_s
        self.wait_s = wait_s
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self._unknown_is_default = unknown_is_default
        self.is_draining = False
        self._is_measured = is_measured
        self._on_loaded = on_loaded
        self._start = start
        self._room = asyncio.Lock()  # one model at a time looks for memory, in order of arrival

    def add(self, slot: ModelSlot) -> None:
        slot.keep_alive_s = self.keep_alive_s
        slot.state.is_on_demand = True
        self.slots[slot.name] = slot

    async def remove(self, slot: ModelSlot) -> None:
        """Ends the engine of a slot without users, and forgets it. Requests that come meanwhile
        wait, and find no such model.
        """
        slot.is_removed = True
        slot.clear_timers()
        if slot.phase in ("ready", "sleeping"):
            await self._outcome(self._leave(slot, unload=True))
        del self.slots[slot.name]

    def unknown(self, name: str) -> ApiError:
        served = ", ".join(map(repr, self.slots))
        message = f"The model {name!r} does not exist. This server has {served}."
        return ApiError(404, message, code="model_not_found", param="model")

    def find(self, name: str | None) -> ModelSlot:
        """The slot of a body's `model`; without a name the default. Raises ApiError 404 for an
        unknown one, unless the default answers for such.
        """
        if not name:
            return self.default
        if (slot := self.slots.get(name) or self._of_lora(name)) is None:
            if self._unknown_is_default:
                return self.default
            raise self.unknown(name)
        return slot

    def _of_lora(self, name: str) -> ModelSlot | None:
        """The slot whose adapter has this name."""
        slots = self.slots.values()
        return next((slot for slot in slots if slot.state.loras.get(name) is not None), None)

    # ------------------------------------------------------------ use

    async def acquire(self, slot: ModelSlot) -> None:
        """Returns when the engine is ready; it stays so until `release`. Cancelling is safe.

        Raises ApiError if the model cannot be loaded, does not fit, or is not ready in time.
        """
        if slot.phase != "ready" and self.num_waiting >= self.max_waiting:
            raise ApiError(
                429,
                f"{self.num_waiting} requests wait for models to be loaded, the most that may.",
                code="rate_limit_exceeded",
                retry_after_s=RETRY_S,
            )
        self.num_waiting += 1
        try:
            async with asyncio.timeout(self.wait_s):
                await self._acquire(slot)
        except TimeoutError:
            raise ApiError(
                503,
                f"The model {slot.name!r} was not ready within {self.wait_s:g} s. "
                + self.figures(slot),
                code="model_not_ready",
                retry_after_s=RETRY_S,
            ) from None
        finally:
            self.num_waiting -= 1

    async def _acquire(self, slot: ModelSlot) -> None:
        self.note_deaths()
        while (obstacle := slot.wanted or slot.leaving) is not None:
            await self._outcome(obstacle)
        self._check_open()
        if slot.is_removed:
            raise self.unknown(slot.name)
        slot.num_users += 1
        slot.idle.clear()
        slot.clear_timers()
        slot.last_used = time.monotonic()
        try:
            while slot.phase != "ready":
                self._check_open()
                if slot.leaving is not None:  # it died as soon as it was ready
                    raise ApiError(503, ENGINE_GONE, code="engine_dead", retry_after_s=RETRY_S)
                await self._outcome(self._bring(slot))
        except BaseException:
            self.release(slot)
            raise

    def release(self, slot: ModelSlot, keep_alive_s: float | None = None) -> None:
        """Ends one use. `keep_alive_s`: from now on the slot's, in place of the server's."""
        slot.num_users -= 1
        slot.last_used = time.monotonic()
        if keep_alive_s is not None:
            slot.keep_alive_s = keep_alive_s
        if slot.num_users:
            return
        slot.idle.set()
        if slot.coming is not None and slot.phase != "loading":
            slot.coming.cancel()  # it waits for memory that nobody needs any more
            slot.coming = None
        self._plan_departure(slot)

    async def unload(self, slot: ModelSlot) -> None:
        """Ends the engine when its users are done. Requests that come later start it again."""
        slot.keep_alive_s = 0.0
        if slot.num_users == 0 and slot.phase in ("ready", "sleeping"):
            await self._outcome(self._leave(slot, unload=True))

    async def _outcome(self, awaited: asyncio.Future[None]) -> None:
        """Waits for a task or future of several waiters; leaving does not cancel it."""
        try:
            await asyncio.shield(awaited)
        except asyncio.CancelledError:
            if awaited.cancelled() and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise shutting_down() from None
            raise

    def _check_open(self) -> None:
        if self.is_draining:
            raise shutting_down()

    # ------------------------------------------------------------ coming

    def _bring(self, slot: ModelSlot) -> asyncio.Task[None]:
        """The task that makes the slot ready; all that wait for it share it."""
        if slot.coming is None:
            context = contextvars.copy_context()
            context.run(name_model, slot.name)  # the engine's process and its tasks log it
            loop = asyncio.get_running_loop()
            slot.coming = loop.create_task(self._come(slot), context=context)
            # a failure that nobody waits for any more is not an error of the loop
            slot.coming.add_done_callback(lambda task: task.cancelled() or task.exception())
        return slot.coming

    async def _come(self, slot: ModelSlot) -> None:
        task = asyncio.current_task()
        try:
            async with self._room:
                if slot.leaving is not None:  # for a model that is not wanted any more
                    await asyncio.wait([slot.leaving])
                await self._make_room(slot)
                was_asleep = slot.is_asleep
                slot.phase, slot.is_asleep = "loading", False  # from here on it holds its memory
            began = time.monotonic()
            await self._load(slot, was_asleep)
            slot.phase, slot.has_loaded = "ready", True
            verb = "awake" if was_asleep else "ready"
            tell(f"{verb}: {slot.name}, after {time.monotonic() - began:.1f} s")
            self._on_loaded()
        finally:
            if slot.coming is task:
                slot.coming = None
            if slot.num_users == 0:
                self._plan_departure(slot)

    async def _load(self, slot: ModelSlot, was_asleep: bool) -> None:
        """Starts or wakes the engine. A failure leaves the slot unloaded, for the next attempt."""
        engine, slot.state.loading = slot.state.engine, Loading()
        slot.state.is_loading = True
        try:
            if was_asleep and engine is not None:
                await engine.call_utility("wake_up", None)
                return
            engine = await self._start(slot.args, "process", slot.state.loading.report)
            await slot.state.adopt_engine(engine)
        except BaseException as error:
            slot.state.clear_engine()
            slot.phase = "unloaded"
            if engine is not None:
                await engine.shutdown_async()
            if isinstance(error, ENDS):
                raise
            slot.state.loading.error = str(error)
            unexpected = None if isinstance(error, QuireError) else error
            logger.error("%s could not be loaded: %s", slot.name, error, exc_info=unexpected)
            cause = str(error) if unexpected is None else "the server's log has the cause"
            raise ApiError(
                503,
                f"The model {slot.name!r} could not be loaded: {cause}",
                code="model_load_failed",
            ) from error
        finally:
            slot.state.is_loading = False

    # ------------------------------------------------------------ memory

    @property
    def free_bytes(self) -> int:
        """What is left of the limit; if it was measured, no more than is free now."""
        slots = self.slots.values()
        free = self.limit_bytes - sum(slot.held_bytes for slot in slots)
        if self._is_measured:
            coming = sum(slot.needs.total_bytes for slot in slots if slot.phase == "loading")
            free = min(free, free_memory_bytes() - coming)
        return free

    async def _make_room(self, slot: ModelSlot) -> None:
        """Returns when the slot's needs fit beside what the others hold. The idle ones leave, the
        least recently used first; then a busy one is waited for, and its new users wait.

        Raises ApiError if it would not fit alone.
        """
        if slot.needs.total_bytes > self.limit_bytes:
            raise self._too_large(slot)
        while (missing := slot.needs.total_bytes - slot.held_bytes - self.free_bytes) > 0:
            others = [s for s in self.slots.values() if s is not slot and s.held_bytes]
            # the users of a sleeping one wait behind this slot
            idle = [s for s in others if s.num_users == 0 or s.phase == "sleeping"]
            idle = [s for s in idle if s.phase in ("ready", "sleeping")]
            if going := next((s.leaving for s in others if s.leaving is not None), None):
                await asyncio.wait([going])
            elif idle:
                oldest = min(idle, key=lambda s: s.last_used)
                await asyncio.wait([self._leave_for(oldest, missing)])
            elif others:
                await self._wait_for(min(others, key=lambda s: s.last_used), missing)
            else:
                raise self._too_large(slot)

    def _leave_for(self, slot: ModelSlot, missing_bytes: int) -> asyncio.Task[None]:
        """Lets an idle engine sleep if that is enough, or ends it."""
        saved_asleep = slot.held_bytes - slot.needs.runtime_bytes
        return self._leave(slot, unload=saved_asleep < missing_bytes)

    async def _wait_for(self, slot: ModelSlot, missing_bytes: int) -> None:
        """Waits until the users that the slot has now are done, and lets it leave."""
        slot.wanted = asyncio.get_running_loop().create_future()
        try:
            await slot.idle.wait()
            if slot.coming is not None:  # its users left while it was loading
                await asyncio.wait([slot.coming])
            if slot.phase == "ready":
                self._leave_for(slot, missing_bytes)
        finally:
            slot.wanted.set_result(None)
            slot.wanted = None

    def figures(self, slot: ModelSlot) -> str:
        needs = slot.needs
        parts = (
            ("weights", needs.weights_bytes),
            ("KV cache", needs.kv_cache_bytes),
            ("process", needs.runtime_bytes),
        )
        listed = ", ".join(f"{name} {gib(size)}" for name, size in parts)
        held = [
            f"{s.name} {gib(s.held_bytes)} ({'busy' if s.num_users else s.phase})"
            for s in self.slots.values()
            if s is not slot and s.held_bytes
        ]
        others = f"; in use: {', '.join(held)}" if held else ""
        return (
            f"It needs {gib(needs.total_bytes)} ({listed}); {gib(max(0, self.free_bytes))} of "
            f"{gib(self.limit_bytes)} is free{others}."
        )

    def _too_large(self, slot: ModelSlot) -> ApiError:
        return ApiError(
            503,
            f"The model {slot.name!r} does not fit into memory. {self.figures(slot)} It needs "
            "less with a smaller max_model_len or kv_cache_memory_bytes, or with quantization int8 "
            "or int4.",
            code="not_enough_memory",
        )

    # ------------------------------------------------------------ leaving

    def _plan_departure(self, slot: ModelSlot) -> None:
        """Called when a slot has become idle: sets the times at which it sleeps and ends."""
        slot.clear_timers()
        if slot.phase not in ("ready", "sleeping") or slot.keep_alive_s < 0 or self.is_draining:
            return
        if slot.keep_alive_s == 0:
            self._leave(slot, unload=True)
            return
        loop, keep_alive_s = asyncio.get_running_loop(), slot.keep_alive_s
        sleep_after_s = keep_alive_s / 2 if self.sleep_after_s is None else self.sleep_after_s
        if 0 <= sleep_after_s < keep_alive_s and slot.phase == "ready":
            slot.timers.append(loop.call_later(sleep_after_s, self._leave_if_idle, slot, False))
        slot.timers.append(loop.call_later(keep_alive_s, self._leave_if_idle, slot, True))
        slot.unloads_at = slot.state.now() + keep_alive_s

    def _leave_if_idle(self, slot: ModelSlot, unload: bool) -> None:
        is_there = slot.phase == "ready" or (unload and slot.phase == "sleeping")
        if slot.num_users == 0 and is_there:
            self._leave(slot, unload=unload)
        elif unload and slot.leaving is not None:  # it is falling asleep: look again afterwards
            slot.leaving.add_done_callback(lambda _: self._leave_if_idle(slot, True))

    def _leave(self, slot: ModelSlot, *, unload: bool) -> asyncio.Task[None]:
        """Lets an idle engine sleep, or ends it. New users wait until that is done."""
        slot.phase = "leaving"
        slot.leaving = asyncio.get_running_loop().create_task(self._left(slot, unload))
        return slot.leaving

    async def _left(self, slot: ModelSlot, unload: bool) -> None:
        engine, began = slot.state.engine, time.monotonic()
        try:
            if engine is not None and not unload:
                try:
                    await engine.call_utility("sleep", 2)
                    slot.phase, slot.is_asleep = "sleeping", True
                    tell(f"asleep: {slot.name}, after {time.monotonic() - began:.1f} s")
                    return
                except QuireError as error:
                    logger.error("%s could not sleep: %s", slot.name, error)
            slot.clear_timers()
            slot.keep_alive_s = self.keep_alive_s
            slot.state.clear_engine()
            if engine is not None:
                await engine.shutdown_async()
            slot.phase, slot.is_asleep = "unloaded", False
            tell(f"unloaded: {slot.name}, after {time.monotonic() - began:.1f} s")
        finally:
            slot.leaving = None

    def note_deaths(self) -> None:
        """Called now and then: an engine that died makes room, and is started on its next use."""
        for slot in self.slots.values():
            engine = slot.state.engine
            if slot.phase in ("ready", "sleeping") and engine is not None and engine.errored:
                logger.error("%s: %s", slot.name, engine.dead_error)
                slot.phase = "leaving"
                slot.leaving = asyncio.get_running_loop().create_task(self._bury(slot))

    async def _bury(self, slot: ModelSlot) -> None:
        try:
            async with asyncio.timeout(DEATH_WAIT_S):
                await slot.idle.wait()
        except TimeoutError:
            logger.warning("%s: its requests did not end with their engine", slot.name)
        await self._left(slot, unload=True)

    # ------------------------------------------------------------ the end

    async def drain(self) -> None:
        """From here on nothing is loaded; those who wait are refused."""
        self.is_draining = True
        for notify in self.at_drain:
            notify()
        for slot in list(self.slots.values()):
            slot.clear_timers()
            if slot.coming is not None:
                slot.coming.cancel()
                await asyncio.wait([slot.coming])

    async def shutdown(self) -> None:
        """Ends all engines; their requests receive an error."""
        await self.drain()
        slots = [slot for slot in self.slots.values() if slot.phase != "unloaded"]
        await asyncio.gather(*(self._end(slot) for slot in slots))

    async def _end(self, slot: ModelSlot) -> None:
        if slot.leaving is not None:
            await asyncio.wait([slot.leaving])
        if slot.state.engine is not None:
            await slot.state.engine.shutdown_async()


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
