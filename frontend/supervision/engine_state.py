"""EngineState holds what a client has set in its engine and the next engine must have too.

Must not know: how calls reach an engine, requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...ipc.errors import EngineDeadError, EngineRestartedError

# These utilities may be called again on the next engine when the first died during the call. They
# only report, or setting the same state twice is setting it once.
REPEATABLE = frozenset(
    {
        "ping",
        "beat",
        "observe",
        "scheduler_state",
        "expert_load",
        "get_metrics",
        "status",
        "check_integrity",
        "execute_dummy_batch",
        "pause",
        "resume",
        "is_paused",
        "stall_reason",
        "sleep",
        "wake_up",
        "is_sleeping",
        "reset_prefix_cache",
        "load_weights",
        "add_lora",
        "remove_lora",
        "list_loras",
        "pin_lora",
    }
)
# Their failure does not prevent a new engine, because adapters' files may be gone.
DISPENSABLE = frozenset({"add_lora", "pin_lora"})


def check_repeatable(method: str, is_repeated: bool, death: EngineDeadError) -> bool:
    """Returns True, because the call is repeated now, or raises EngineRestartedError."""
    if is_repeated or method not in REPEATABLE:
        raise EngineRestartedError(
            f"the engine died during {method} and was started again; {method} may have had no "
            f"effect"
        ) from death
    return True


class Weights(NamedTuple):
    """What load_weights has set. A path alone is not enough, because its files may change between
    calls.
    """

    num_loads: int = 0
    path: str | None = None


NO_WEIGHTS = Weights()  # of load_weights: those of the configuration

_SLEEPS = {1: {"kv_cache"}, 2: {"weights", "kv_cache"}}  # level -> what it frees


@dataclass
class EngineState:
    rows_per_s: int = 0
    pause_mode: str | None = None
    asleep: set[str] = field(default_factory=set)
    weights: Weights = NO_WEIGHTS
    max_loras: int = 1  # so many adapters, the last ones, are loaded again
    loras: dict[int, Any] = field(default_factory=dict)  # by lora_int_id, in order of loading
    pinned_loras: set[int] = field(default_factory=set)

    def note(self, method: str, args: tuple) -> None:
        """Notes that a utility has succeeded."""
        if method == "pause":
            self.pause_mode = args[0] if args else "abort"
        elif method == "resume":
            self.pause_mode = None
        elif method == "sleep":
            self.asleep |= _SLEEPS[args[0] if args else 1]
        elif method == "wake_up":
            tags = args[0] if args else None
            self.asleep -= {"weights", "kv_cache"} if tags is None else set(tags)
        elif method == "load_weights":
            self.weights = Weights(self.weights.num_loads + 1, args[0])
            self.asleep.discard("weights")
        elif method == "add_lora":
            self.loras.pop(args[0].lora_int_id, None)
            self.loras[args[0].lora_int_id] = args[0]
            unpinned = [one for one in self.loras if one not in self.pinned_loras]
            if len(self.loras) > self.max_loras and unpinned:
                del self.loras[unpinned[0]]
        elif method == "remove_lora":
            self.loras.pop(args[0], None)
            self.pinned_loras.discard(args[0])
        elif method == "pin_lora":
            self.pinned_loras.add(args[0])

    def calls(self, loaded: Weights = NO_WEIGHTS) -> list[tuple[str, Any]]:
        """Returns the utilities, with their argument, that bring a new engine into this state.
        `loaded` are weights that it has loaded already.
        """
        calls: list[tuple[str, Any]] = []
        if self.weights != loaded and self.weights.path is not None:
            calls.append(("load_weights", self.weights.path))
        calls += [("add_lora", request) for request in self.loras.values()]
        calls += [("pin_lora", lora_int_id) for lora_int_id in sorted(self.pinned_loras)]
        if self.asleep:
            calls.append(("sleep", 2 if "weights" in self.asleep else 1))
        if self.pause_mode is not None:
            calls.append(("pause", self.pause_mode))
        return calls
