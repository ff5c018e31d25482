"""The LoRA adapters of the engine: which ones are in memory, and when they are read.

Must not know: files, torch, sockets, which request is scheduled when.

    request, add_lora ──▶ known ──▶ read in a thread ──▶ in memory ──▶ used by steps
                            ▲                                │
                            └── max_cpu_loras are in memory: └ the one that was used least recently
                                                               makes room

At most `max_cpu_loras` adapters are in memory, and one is being read. Reading changes nothing that
a step uses. What is read is added between two steps, which costs little.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from typing import Any, Protocol

import msgspec

from ..ipc.config import LoRAConfig, resolved
from ..ipc.errors import InvalidParameterError
from ..ipc.lora import LoRARequest
from .lora_slots import Adapter
from .output_rows import OutputRows
from .scheduling.results import fail_requests
from .scheduling.scheduler import Scheduler


class AdapterMemory(Protocol):
    """See Executor."""

    def read_lora(self, request: LoRARequest) -> Future[str]: ...
    def add_lora(self, request: LoRARequest) -> bool: ...
    def remove_lora(self, lora_int_id: int) -> bool: ...
    def list_loras(self) -> set[int]: ...


class LoraRegistry:
    """Owns the adapters that the engine knows, by the `lora_int_id` of users. Used by the thread
    that runs steps.
    """

    def __init__(
        self,
        config: LoRAConfig,
        scheduler: Scheduler,
        memory: AdapterMemory,
        rows: OutputRows,
        *,
        drain: Callable[[], None],
        is_step_in_flight: Callable[[], bool],
        wake: Callable[[], None],
    ):
        """drain: finishes the steps in flight. wake: ends the wait of the engine's host; called
        from any thread.
        """
        self.is_enabled = config.enable_lora
        self.max_resident = resolved(config.max_cpu_loras) if self.is_enabled else 0
        self._scheduler = scheduler
        self._memory = memory
        self._rows = rows
        self._drain = drain
        self._is_step_in_flight = is_step_in_flight
        self._wake = wake
        self._known: dict[int, Adapter] = {}  # what a new request with this lora_int_id uses
        self._resident: list[Adapter] = []  # in memory
        # What the files of each adapter were when it was read: an adapter that is read again while
        # requests use it must be the same.
        self._files: dict[Adapter, str] = {}
        self._calls: dict[Adapter, list[Future[bool]]] = {}  # add_lora without a result so far
        self._to_load: deque[Adapter] = deque()  # for these calls
        self._reading: tuple[Adapter, int, Future[str]] | None = None
        self._generations, self._numbers = count(1), count(1)

    # ------------------------------------------------------------ requests

    def find(self, request: LoRARequest) -> Adapter:
        """The adapter of a new request. Raises InvalidParameterError if there can be none."""
        known = self._known.get(request.lora_int_id)
        if known is not None and not request.load_inplace:
            _check_same(known.request, request)
            return known
        adapter = Adapter(request, next(self._generations))
        if known is None:  # else it takes its place when it has been read
            self._known[request.lora_int_id] = adapter
        return adapter

    # ------------------------------------------------------------ utilities

    def add_lora(self, request: Any) -> Future[bool]:
        """Reads an adapter, so that it is in memory if there is room. Returns True when that is
        done; raises InvalidParameterError for files that are not an adapter of this model.

        An adapter that is in memory is not read again, except with load_inplace: then requests that
        began before keep the old one, and those that come after use the new one.
        """
        if not self.is_enabled:
            raise InvalidParameterError(
                "lora_request", "needs an engine that was started with enable_lora"
            )
        adapter = self.find(_to_request(request))
        done: Future[bool] = Future()
        if adapter.number is not None:
            adapter.last_used = self._scheduler.num_steps
            done.set_result(True)
        else:
            self._calls.setdefault(adapter, []).append(done)
            self._to_load.append(adapter)
            self.begin_read()
        return done

    def remove_lora(self, lora_int_id: int) -> bool:
        """Forgets an adapter. Requests that use it finish; then its memory is freed. Returns
        whether there was one.
        """
        adapter = self._known.get(_to_id(lora_int_id))
        if adapter is None:
            return False
        self._retire(adapter)
        return True

    def list_loras(self) -> list[int]:
        """The ids of the adapters in memory."""
        return sorted(i for i, adapter in self._known.items() if adapter.number is not None)

    def pin_lora(self, lora_int_id: int) -> bool:
        """Keeps an adapter in memory until remove_lora. It must be there."""
        adapter = self._known.get(_to_id(lora_int_id))
        if adapter is None or adapter.number is None:
            raise InvalidParameterError(
                "lora_int_id", f"{lora_int_id} is not in memory: add_lora first"
            )
        adapter.is_pinned = True
        return True

    # ------------------------------------------------------------ reading

    @property
    def is_reading(self) -> bool:
        return self._reading is not None and not self._reading[2].done()

    def is_due(self) -> bool:
        """Whether `settle` has something to do at once."""
        return self._reading is not None and self._reading[2].done() and self._has_use()

    def blocks_all(self) -> bool:
        """Whether all that could be scheduled waits for the adapter that is being read."""
        scheduler = self._scheduler
        if not self.is_reading or scheduler.running:
            return False
        return all(r.adapter is not None and r.adapter.number is None for r in scheduler.waiting)

    def wait(self, deadline: float | None) -> None:
        """Blocks until the adapter is read, or until `deadline`, by time.monotonic()."""
        assert self._reading is not None
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        with contextlib.suppress(Exception):  # `settle` takes it
            self._reading[2].exception(timeout_s)

    def settle(self) -> None:
        """Takes what has been read, and frees what is no longer used. Called between two steps."""
        if self.is_due():
            self._drain()
            self._take()
        self.free_unused()
        self.begin_read()

    def begin_read(self) -> None:
        """Reads the next adapter: for add_lora, or for the first request that waits for one."""
        if self._reading is not None and self._to_load and self._reading[2].done():
            self._drop_read()  # it has been read, and there is no room for it
        if self._reading is not None:
            return
        while self._to_load and self._to_load[0] not in self._calls:
            self._to_load.popleft()
        if self._to_load:
            adapter = self._to_load.popleft()
        else:
            slots = self._scheduler.lora_slots
            wanted = (one for one in slots.wanted if one.number is None)
            if (adapter := next(wanted, None)) is None:
                return
        number = next(self._numbers)
        future = self._memory.read_lora(adapter.numbered(number))
        self._reading = adapter, number, future
        future.add_done_callback(lambda _: self._wake())

    def _has_use(self) -> bool:
        """Whether what has been read is awaited, and there is room for it, or it has failed."""
        assert self._reading is not None
        adapter, _, future = self._reading
        if future.exception() is not None or adapter in self._calls or not adapter.num_users:
            return True
        if len(self._resident) < self.max_resident or self._victim(adapter) is not None:
            return True
        return all(one.is_pinned for one in self._resident)

    def _take(self) -> None:
        assert self._reading is not None
        adapter, number, future = self._reading
        if (error := future.exception()) is not None:
            self._drop_read()
            return self._fail(adapter, error)
        files = future.result()
        if self._files.setdefault(adapter, files) != files:
            self._drop_read()
            return self._fail(
                adapter,
                InvalidParameterError(
                    "lora_request",
                    f"the files in {adapter.request.lora_path} have changed since "
                    f"{adapter.name!r} was loaded; load it again with load_inplace",
                ),
            )
        if not (adapter.num_users or adapter in self._calls):
            self._drop_read()
            return self._forget_unused(adapter)
        if not self._make_room(adapter):
            if adapter in self._calls:  # it is known to be good; requests that use it read it again
                self._drop_read()
                self._answer(adapter)
                self._forget_unused(adapter)
            elif all(one.is_pinned for one in self._resident):
                self._drop_read()
                self._fail(adapter, _all_pinned(self.max_resident))
            return
        self._reading = None
        try:
            self._memory.add_lora(adapter.numbered(number))
        except Exception as failure:
            return self._fail(adapter, failure)
        adapter.number, adapter.last_used = number, self._scheduler.num_steps
        self._resident.append(adapter)
        self._scheduler.lora_slots.reconsider()
        self._answer(adapter)

    def _answer(self, adapter: Adapter) -> None:
        """The adapter has been read: it takes the place of another with its id."""
        lora_int_id = adapter.request.lora_int_id
        known = self._known.get(lora_int_id)
        if known is not adapter and adapter.request.load_inplace:
            if known is not None:
                self._retire(known)
            self._known[lora_int_id] = adapter
        for future in self._calls.pop(adapter, ()):
            future.set_result(True)

    def _drop_read(self) -> None:
        assert self._reading is not None
        (_, number, _), self._reading = self._reading, None
        self._memory.remove_lora(number)

    def _fail(self, adapter: Adapter, error: BaseException) -> None:
        """The adapter cannot be used: its requests end, and calls raise."""
        if not isinstance(error, InvalidParameterError):
            error = RuntimeError(f"{adapter.name!r} could not be read: {error}")
        users = [r for r in self._scheduler.requests.values() if r.adapter is adapter]
        fail_requests(self._scheduler, users, error, self._rows)
        self._forget(adapter)
        for future in self._calls.pop(adapter, ()):
            future.set_exception(error)

    # ------------------------------------------------------------ memory

    def _make_room(self, adapter: Adapter) -> bool:
        while len(self._resident) >= self.max_resident:
            if (victim := self._victim(adapter)) is None:
                return False
            self._evict(victim)
        return True

    def _victim(self, adapter: Adapter) -> Adapter | None:
        """The adapter to free for this one: the least recently used of those that no running
        request uses, that are not pinned, and that no request before this one's in the queue waits
        for.
        """
        wanted = self._scheduler.lora_slots.wanted
        first = set(wanted[: wanted.index(adapter)]) if adapter in wanted else set()
        idle = [
            one for one in self._resident if not (one.num_running or one.is_pinned or one in first)
        ]
        return min(idle, key=lambda one: one.last_used, default=None)

    def _evict(self, adapter: Adapter) -> None:
        self._resident.remove(adapter)
        number, adapter.number = adapter.number, None
        self._memory.remove_lora(resolved(number))
        self._forget_unused(adapter)

    def _forget_unused(self, adapter: Adapter) -> None:
        """An adapter that is neither in memory nor used has no state."""
        if not adapter.num_users and adapter.number is None and adapter not in self._calls:
            self._forget(adapter)

    def _forget(self, adapter: Adapter) -> None:
        lora_int_id = adapter.request.lora_int_id
        if self._known.get(lora_int_id) is adapter:
            del self._known[lora_int_id]
        self._files.pop(adapter, None)

    def _retire(self, adapter: Adapter) -> None:
        """No new request uses it."""
        adapter.is_pinned = False
        del self._known[adapter.request.lora_int_id]
        if not adapter.num_users:
            self._scheduler.unused_adapters.append(adapter)
            self.free_unused()

    def free_unused(self) -> None:
        """Forgets adapters that no request uses and that no new one can use, if no step runs."""
        unused = self._scheduler.unused_adapters
        if not unused or self._is_step_in_flight():
            return
        for adapter in unused:
            is_known = self._known.get(adapter.request.lora_int_id) is adapter
            if not is_known and not adapter.num_users and adapter in self._resident:
                self._evict(adapter)
            self._forget_unused(adapter)
        unused.clear()

    # ------------------------------------------------------------ observers

    def status(self) -> dict[str, Any]:
        """The names of the adapters that running and waiting requests use, the limits, and how many
        are in memory; empty without enable_lora.
        """
        if not self.is_enabled:
            return {}
        users = {r.adapter for r in self._scheduler.requests.values() if r.adapter is not None}
        return {
            "max_loras": self._scheduler.lora_slots.max_loras,
            "max_cpu_loras": self.max_resident,
            "num_in_memory": len(self._resident),
            "running": sorted({one.name for one in users if one.num_running}),
            "waiting": sorted({one.name for one in users if one.num_users > one.num_running}),
        }

    def check_integrity(self) -> None:
        """Raises AssertionError if the adapters here, in the scheduler and the executor differ."""
        scheduler = self._scheduler
        self.free_unused()
        users = [r.adapter for r in scheduler.requests.values() if r.adapter is not None]
        numbers = {one.number for one in self._resident}
        expected = {
            "adapters in memory are those of the executor": numbers == self._memory.list_loras(),
            "no more than max_cpu_loras are in memory": len(self._resident) <= self.max_resident,
            "users are counted": all(one.num_users == users.count(one) for one in {*users}),
            "running requests have theirs in memory": all(
                r.adapter is None or r.adapter in self._resident for r in scheduler.running
            ),
            "known adapters are in use or in memory": all(
                one.num_users or one.number is not None or one in self._calls
                for one in self._known.values()
            ),
        }
        broken = [claim for claim, holds in expected.items() if not holds]
        if broken:
            raise AssertionError(f"LoRA adapters: it does not hold that {'; '.join(broken)}")


def _check_same(known: LoRARequest, request: LoRARequest) -> None:
    if (known.lora_name, known.lora_path) != (request.lora_name, request.lora_path):
        raise InvalidParameterError(
            "lora_request",
            f"lora_int_id {known.lora_int_id} is that of {known.lora_name!r} from "
            f"{known.lora_path}, got {request.lora_name!r} from {request.lora_path}; each adapter "
            f"needs an id of its own, or load_inplace",
        )


def _all_pinned(max_resident: int) -> InvalidParameterError:
    return InvalidParameterError(
        "lora_request",
        f"there is no room for another adapter: all max_cpu_loras={max_resident} in memory are "
        f"pinned",
    )


def _to_request(value: Any) -> LoRARequest:
    try:
        return msgspec.convert(value, LoRARequest)
    except msgspec.ValidationError as error:
        raise InvalidParameterError("lora_request", f"must be a LoRARequest: {error}") from None


def _to_id(value: Any) -> int:
    if type(value) is not int:
        raise InvalidParameterError("lora_int_id", f"must be an integer, got {value!r}")
    return value
