"""The answers of several engines as one."""

from __future__ import annotations

import pytest
from quire.core.engine_core import EngineCore
from quire.frontend.clients.replicas.calls import REPORTS, TRACES, Observations, join
from quire.frontend.supervision.engine_state import REPEATABLE
from quire.tests.fakes import FakeExecutor, make_config


@pytest.mark.parametrize(
    ("method", "results", "expected"),
    [
        ("ping", ["pong", "pong"], "pong"),
        ("get_metrics", [{"a": 1, "b": 2}, {"a": 3, "b": 4}], {"a": 4, "b": 6}),
        ("check_integrity", [True, True], True),
        ("reset_prefix_cache", [True, False], False),
        ("is_paused", [True, False], False),
        ("stall_reason", ["asleep", None], None),
        ("stall_reason", ["asleep", "asleep"], "asleep"),
        ("list_loras", [[1, 3], [1, 2]], [1, 2, 3]),
        ("collective_rpc", [["a"], ["b"]], ["a", "b"]),
        (
            "expert_load",
            [{"layers": [0, 3], "tokens": [[1, 0], [2, 2]]}] * 2,
            {"layers": [0, 3], "tokens": [[2, 0], [4, 4]]},
        ),
    ],
)
def test_answers_are_joined(method, results, expected) -> None:
    assert join(method, results) == expected


def test_one_answer_is_joined_to_itself() -> None:
    core = EngineCore(config := make_config(), FakeExecutor(config))
    for method in ("get_metrics", "status", "scheduler_state", "expert_load"):
        assert (
            join(method, [getattr(core.observer, method)()]) == getattr(core.observer, method)()
        ), method


def test_two_states_are_joined() -> None:
    core = EngineCore(config := make_config(), FakeExecutor(config))
    state, status = core.observer.scheduler_state(), core.observer.status()
    joined = join("scheduler_state", [state | {"running": ["a"]}, state | {"running": ["b"]}])
    assert joined["running"] == ["a", "b"] and joined["asleep"] == []
    assert joined["num_free_slots"] == 2 * state["num_free_slots"]
    assert joined["is_paused"] is False
    busy = {"experts": [(0, 1.5, 0.25)], "num_held": 2, "accepted_per_pos": [1, 2]}
    lora = {"max_loras": 1, "running": ["x"], "waiting": []}
    joined = join(
        "status",
        [
            status | busy | {"loras": lora},
            status | busy | {"experts": [(0, 3.0, 0.0)], "loras": lora | {"running": ["y"]}},
        ],
    )
    assert joined["experts"] == [(0, 3.0, 0.0)] and joined["num_held"] == 4
    assert joined["accepted_per_pos"] == [2, 4] and joined["loras"]["running"] == ["x", "y"]


def test_every_utility_that_only_reports_is_known() -> None:
    """Others are called on all replicas, one after the other."""
    core = EngineCore(config := make_config(), FakeExecutor(config))
    assert core.utilities.utilities.keys() > REPORTS | TRACES
    assert REPORTS <= REPEATABLE


def observation(step: int, steps: list[list]) -> dict:
    counts = {"free": 1, "cached": 2, "used": 0, "shared": 0}
    return {
        "time": float(step),
        "step": step,
        "steps": steps,
        "requests": [{"request_id": f"r{step}", "queued_time": -step}],
        "num_blocks": 3,
        "blocks": "-cc",
        "blocks_per_cell": 1,
        "block_counts": counts,
        "counters": {"num_running": 1},
    }


def test_steps_of_all_engines_have_numbers_of_their_own() -> None:
    observations = Observations(2)
    first = {0: observation(1, [[0, 0.1], [1, 0.4]]), 1: observation(0, [[0, 0.2]])}
    seen = observations.join(first, -1)
    assert seen["steps"] == [[0, 0.1], [1, 0.2], [2, 0.4]] and seen["step"] == 2
    assert [one["request_id"] for one in seen["requests"]] == ["r1", "r0"]
    assert seen["num_blocks"] == 6 and seen["blocks"] == "-cc-cc"
    assert seen["block_counts"]["cached"] == 4 and seen["counters"] == {"num_running": 2}
    assert observations.since(0, 0) == 1 and observations.since(1, 0) == 0
    assert observations.since(1, 1) == -1  # another engine
    seen = observations.join({1: observation(0, [[0, 0.9]])}, 2)
    assert seen["steps"] == [[3, 0.9]] and seen["step"] == 3
