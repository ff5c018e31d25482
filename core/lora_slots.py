"""Which LoRA adapters the requests of a step may use: at most `max_loras` different ones.

Must not know: files, when an adapter is read, the queue's order, slots and blocks.

A request whose adapter cannot be used in this step is passed over, and others start. So that it
does not wait forever for adapters that are in use, it is overtaken by at most MAX_OVERTAKES
requests with an adapter. After them, the adapter that has been in use for the longest time is
barred: its running requests finish, and none that comes later in the queue starts, until the one
that waits has its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ..ipc.config import resolved
from ..ipc.lora import LoRARequest

MAX_OVERTAKES = 16


@dataclass(slots=True, eq=False, repr=False)
class Adapter:
    """One load of an adapter. Its weights never change: a reload is another Adapter, with another
    generation. The prefix cache shares blocks within one generation.
    """

    request: LoRARequest  # the user's
    generation: int
    number: int | None = None  # in the executor, while it is in memory there
    num_users: int = 0  # unfinished requests in the scheduler
    num_running: int = 0  # of these, those that hold a slot
    num_overtakes: int = 0  # requests that started while one with this adapter waited for it
    last_used: int = 0  # a step
    is_pinned: bool = False

    @property
    def name(self) -> str:
        return self.request.lora_name

    def numbered(self, number: int | None = None) -> LoRARequest:
        """What the executor knows it by; `number`: before it is in memory."""
        lora_int_id = resolved(self.number if number is None else number)
        return msgspec.structs.replace(self.request, lora_int_id=lora_int_id, load_inplace=False)

    def __repr__(self) -> str:
        return f"Adapter({self.name!r}, generation={self.generation}, number={self.number})"


class LoraSlots:
    """Owns the set of adapters in use. One pass over the queue is begin_pass, then may_start and
    start for its requests, then end_pass.
    """

    def __init__(self, max_loras: int):
        self.max_loras = max_loras
        # of running requests, in the order in which their use began
        self.active: dict[Adapter, None] = {}
        self.has_siblings = False  # a request was passed over that waits for a sibling
        # Nothing has changed since a pass in which all waiting requests were passed over.
        self.is_stuck = False
        # adapters that requests wait for, in the order of the queue -> requests started before
        self._blocked: dict[Adapter, int] = {}
        self._barred: set[Adapter] = set()
        self._num_started = 0  # in this pass, with an adapter

    @property
    def wanted(self) -> list[Adapter]:
        """The adapters that requests waited for in the last pass, in the order of the queue."""
        return [adapter for adapter in self._blocked if adapter.num_users]

    def enter(self, adapter: Adapter | None) -> None:
        """A request comes, with this adapter."""
        self.is_stuck = False
        if adapter is not None:
            adapter.num_users += 1

    def leave(self, adapter: Adapter | None) -> Adapter | None:
        """A request with this adapter has ended. Returns the adapter if no other one uses it."""
        self.is_stuck = False
        if adapter is not None:
            adapter.num_users -= 1
            return None if adapter.num_users else adapter
        return None

    def reconsider(self) -> None:
        """Something has changed: the next pass looks at all waiting requests again."""
        self.is_stuck = False

    def note_sibling(self) -> None:
        """A request is passed over in this pass because it waits for a sibling."""
        self.has_siblings = True

    def begin_pass(self) -> None:
        self._blocked, self._barred, self._num_started = {}, set(), 0
        self.has_siblings = False

    def end_pass(self, *, is_stuck: bool) -> None:
        """is_stuck: all waiting requests were passed over."""
        for adapter, num_before in self._blocked.items():
            adapter.num_overtakes += self._num_started - num_before
        self.is_stuck = is_stuck

    def can_use(self, adapter: Adapter | None) -> bool:
        """Whether a step may use this adapter, too."""
        if adapter is None:
            return True
        has_place = adapter in self.active or len(self.active) < self.max_loras
        return has_place and adapter.number is not None

    def may_start(self, adapter: Adapter) -> bool:
        """Whether the next request of the queue, which uses this adapter, may start."""
        if adapter in self._barred:
            return False
        if self.can_use(adapter):
            return True
        if adapter not in self._blocked:
            self._blocked[adapter] = self._num_started
            if adapter.num_overtakes >= MAX_OVERTAKES:
                in_use = (other for other in self.active if other not in self._barred)
                if (oldest := next(in_use, None)) is not None:
                    self._barred.add(oldest)
        return False

    def start(self, adapter: Adapter, step: int) -> None:
        """A request with this adapter takes a slot."""
        if not adapter.num_running:
            self.active[adapter] = None
            adapter.num_overtakes = 0
        adapter.num_running += 1
        adapter.last_used = step
        self._num_started += 1

    def release(self, adapter: Adapter, step: int) -> None:
        """A request with this adapter gives its slot back."""
        adapter.num_running -= 1
        adapter.last_used = step
        if not adapter.num_running:
            del self.active[adapter]
