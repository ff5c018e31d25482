"""The models of a server that has several: who may use which engine, and which ones sleep or end so
that others fit into memory.

Must not know: HTTP beyond the errors that it raises, routes, what a request contains.

`acquire` makes a model ready and counts its user; `release` ends the use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...ipc.machine import free_memory_bytes
from ..async_llm import AsyncLLM
from .http.errors import ENGINE_GONE, ApiError
from .model_slot import ModelSlot, StartEngine
from .state import shutting_down

RETRY_S = 5.0  # Retry-After where memory may be free soon


@dataclass(frozen=True)
class Downloads:
    """How a model that a client pulls is downloaded and becomes a slot.

    make_slot gives the slot of a name on the hub whose files are there, planned as one of so many
    models. It blocks, and raises QuireError. revision and download_dir are as in EngineArgs.
    """

    make_slot: Callable[[str, int], ModelSlot]
    revision: str | None = None
    download_dir: str | None = None


class Models:
    """All slots of a server: those of the command line in their order, then the pulled ones.

    default is the slot of requests that name no model. limit_bytes is the memory for all engines.
    If is_measured, it was measured at start, so memory that others have taken since counts too.
    keep_alive_s and sleep_after_s are the idle times after which an engine ends and sleeps;
    negative means never. wait_s is the longest wait of a request for its model. max_waiting is the
    most requests that may wait so; further ones are refused. on_loaded is called after each load.
    downloads is None if clients may not pull models. at_drain is called when the server begins to
    end.
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
        start: StartEngine = AsyncLLM.start,
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
        self.slots[slot.name] = slot

    async def remove(self, slot: ModelSlot) -> None:
        """Ends the engine of a slot without users, and forgets it. Requests that come meanwhile
        wait, and find no such model.
        """
        if (leaving := slot.remove()) is not None:
            await self._outcome(leaving)
        del self.slots[slot.name]

    def unknown(self, name: str) -> ApiError:
        served = ", ".join(map(repr, self.slots))
        message = f"The model {name!r} does not exist. This server has {served}."
        return ApiError(404, message, code="model_not_found", param="model")

    def find(self, name: str | None) -> ModelSlot:
        """Returns the slot of a body's `model`, or the default without a name. Raises ApiError 404
        for an unknown one, unless the default answers for such.
        """
        if not name:
            return self.default
        if (slot := self.slots.get(name) or self._of_lora(name)) is None:
            if self._unknown_is_default:
                return self.default
            raise self.unknown(name)
        return slot

    def _of_lora(self, name: str) -> ModelSlot | None:
        """Returns the slot whose adapter has this name."""
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
        slot.begin_use()
        try:
            while slot.phase != "ready":
                self._check_open()
                if slot.leaving is not None:  # it died as soon as it was ready
                    raise ApiError(503, ENGINE_GONE, code="engine_dead", retry_after_s=RETRY_S)
                await self._outcome(slot.bring(self._come))
        except BaseException:
            self.release(slot)
            raise

    def release(self, slot: ModelSlot, keep_alive_s: float | None = None) -> None:
        """Ends one use. From now on `keep_alive_s` is the slot's, in place of the server's."""
        slot.end_use(keep_alive_s)
        self._plan_departure(slot)

    async def unload(self, slot: ModelSlot) -> None:
        """Ends the engine when its users are done. Requests that come later start it again."""
        if (leaving := slot.end_early()) is not None:
            await self._outcome(leaving)

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

    async def _come(self, slot: ModelSlot) -> None:
        """Makes the slot ready."""
        try:
            async with self._room:
                if slot.leaving is not None:  # for a model that is not wanted any more
                    await asyncio.wait([slot.leaving])
                await self._make_room(slot)
                was_asleep = slot.take_memory()
            await slot.load(self._start, was_asleep=was_asleep)
            self._on_loaded()
        finally:
            slot.end_coming(asyncio.current_task())
            self._plan_departure(slot)

    def _plan_departure(self, slot: ModelSlot) -> None:
        if slot.num_users == 0 and not self.is_draining:
            slot.plan_departure(self.keep_alive_s, self.sleep_after_s)

    # ------------------------------------------------------------ memory

    @property
    def free_bytes(self) -> int:
        """Returns what is left of the limit. If it was measured, the result is no more than is free
        now.
        """
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
            # The users of a sleeping one wait behind this slot.
            idle = [s for s in others if s.num_users == 0 or s.phase == "sleeping"]
            idle = [s for s in idle if s.is_in_memory]
            if going := next((s.leaving for s in others if s.leaving is not None), None):
                await asyncio.wait([going])
            elif idle:
                oldest = min(idle, key=lambda s: s.last_used)
                await asyncio.wait([oldest.leave_for(missing)])
            elif others:
                await min(others, key=lambda s: s.last_used).leave_when_idle(missing)
            else:
                raise self._too_large(slot)

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

    def note_deaths(self) -> None:
        """Makes room where an engine has died. It is called now and then."""
        for slot in self.slots.values():
            slot.note_death()

    # ------------------------------------------------------------ the end

    async def drain(self) -> None:
        """Loads nothing from here on, and refuses those who wait."""
        self.is_draining = True
        for notify in self.at_drain:
            notify()
        for slot in list(self.slots.values()):
            await slot.drain()

    async def shutdown(self) -> None:
        """Ends all engines. Their requests receive an error."""
        await self.drain()
        slots = [slot for slot in self.slots.values() if slot.phase != "unloaded"]
        await asyncio.gather(*(slot.shutdown() for slot in slots))


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
