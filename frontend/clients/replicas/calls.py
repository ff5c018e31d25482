"""Decides which replicas a utility is for, and makes one answer from those of several.

Must not know: how a call reaches an engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# These go to one replica, whose steps are traced.
TRACES = frozenset({"start_trace", "wait_for_trace", "end_trace"})
# These only report. Replicas that are being replaced are left out, unless all are.
REPORTS = frozenset(
    {
        "ping",
        "beat",
        "observe",
        "scheduler_state",
        "expert_load",
        "get_metrics",
        "status",
        "check_integrity",
        "is_paused",
        "is_sleeping",
        "stall_reason",
        "list_loras",
    }
)
# All others change the engine, and every replica is changed. The first one checks the arguments,
# then the rest is called. A pause with these arguments is called everywhere at once, since it may
# wait for requests.
PAUSES = ((), ("abort",), ("wait",), ("keep",))
# A replica that differs from the others in these must not be used any more.
DIVISIVE = frozenset({"load_weights"})
# The prefix caches are empty after these.
FORGETTING = frozenset({"reset_prefix_cache", "load_weights", "sleep"})


def is_simultaneous(method: str, args: tuple) -> bool:
    """Returns whether the replicas are called at the same time, before one has answered."""
    return method in REPORTS or (method == "pause" and args in PAUSES)


def join(method: str, results: Sequence[Any]) -> Any:
    """Returns the answer of all replicas, from one result of each in their order. There is at least
    one.
    """
    return JOINS[method](results) if method in JOINS else results[0]


def _sum(results: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(one[name] for one in results) for name in results[0]}


def _add(lists: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, lists))
    return [sum(one[i] for one in lists if i < len(one)) for i in range(longest)]


def _chain(lists: Sequence[Sequence[Any]]) -> list[Any]:
    return [item for one in lists for item in one]


def _status(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    steps, loras = [one["step_tokens"] for one in results], [one["loras"] for one in results]
    joined = {
        "num_held": sum(one["num_held"] for one in results),
        "step_tokens": {
            "bounds": steps[0]["bounds"],
            "counts": _add([one["counts"] for one in steps]),
            "sum": sum(one["sum"] for one in steps),
        },
        "accepted_per_pos": _add([one["accepted_per_pos"] for one in results]),
        # Each layer gets the highest imbalance, and the fewest experts without tokens.
        "experts": [
            (layer[0][0], max(one[1] for one in layer), min(one[2] for one in layer))
            for layer in zip(*(one["experts"] for one in results))
        ],
    }
    if loras[0]:
        names = {key: sorted(set(_chain([one[key] for one in loras]))) for key in NAMED}
        joined["loras"] = loras[0] | names
    return results[0] | joined


NAMED = ("running", "waiting")


def _scheduler_state(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Lists are joined and counts are added; the rest is equal."""
    joined = dict(results[0])
    for name, value in results[0].items():
        values = [one[name] for one in results]
        if name == "asleep":
            continue
        if isinstance(value, list):
            joined[name] = _chain(values)
        elif isinstance(value, float):  # a share
            joined[name] = sum(values) / len(values)
        elif type(value) is int:
            joined[name] = sum(values)
    return joined


def _expert_load(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tokens = [_add(of_layer) for of_layer in zip(*(one["tokens"] for one in results))]
    return results[0] | {"tokens": tokens}


def _stall_reason(results: Sequence[str | None]) -> str | None:
    return None if None in results else results[0]


JOINS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "get_metrics": _sum,
    "status": _status,
    "scheduler_state": _scheduler_state,
    "expert_load": _expert_load,
    "stall_reason": _stall_reason,
    "list_loras": lambda results: sorted(set(_chain([list(one) for one in results]))),
    "collective_rpc": _chain,
    "check_integrity": all,
    "reset_prefix_cache": all,
    "is_paused": all,
    "is_sleeping": all,
}


class Observations:
    """Joins what `observe` tells of each replica. The steps of all get numbers of their own, in
    the order in which they began, so that a caller can ask for those after one.
    """

    MAX_STEPS = 512  # kept, as in an engine

    def __init__(self, num_replicas: int):
        self._last = [-1] * num_replicas  # step that has been seen
        self._epochs = [0] * num_replicas
        self._steps: deque[list] = deque(maxlen=self.MAX_STEPS)
        self._num_steps = 0

    def since(self, replica: int, epoch: int) -> int:
        """Returns the step after which this replica is asked."""
        if epoch != self._epochs[replica]:  # another engine, which counts from 0
            self._epochs[replica], self._last[replica] = epoch, -1
        return self._last[replica]

    def join(self, results: Mapping[int, dict[str, Any]], since_step: int) -> dict[str, Any]:
        """Joins results by replica, each of which begins after the replica's own last step."""
        new = []
        for replica, result in results.items():
            new += [step for step in result["steps"] if step[0] > self._last[replica]]
            self._last[replica] = max(self._last[replica], result["step"])
        for step in sorted(new, key=lambda step: step[1]):
            self._steps.append([self._num_steps, *step[1:]])
            self._num_steps += 1
        every = list(results.values())
        return every[0] | {
            "time": max(one["time"] for one in every),
            "step": self._num_steps - 1,
            "steps": [list(step) for step in self._steps if step[0] > since_step],
            "requests": sorted(
                _chain([one["requests"] for one in every]), key=lambda one: one["queued_time"]
            ),
            "num_blocks": sum(one["num_blocks"] for one in every),
            "blocks": "".join(one["blocks"] for one in every),
            "blocks_per_cell": max(one["blocks_per_cell"] for one in every),
            "block_counts": _sum([one["block_counts"] for one in every]),
            "counters": _sum([one["counters"] for one in every]),
        }
