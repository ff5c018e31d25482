"""EngineState: the calls that bring a new engine into the state of the last one."""

from __future__ import annotations

import pytest
from quire import LoRARequest
from quire.frontend.supervision.engine_state import REPEATABLE, EngineState
from quire.tests.core.engine_loop import make_core

A, B = LoRARequest("a", 1, "/adapters/a"), LoRARequest("b", 2, "/adapters/b")


@pytest.mark.parametrize(
    ("noted", "calls"),
    [
        ([], []),
        ([("pause", ())], [("pause", "abort")]),
        ([("pause", ("keep",)), ("pause", ("wait",))], [("pause", "wait")]),
        ([("pause", ("keep",)), ("resume", ())], []),
        ([("sleep", ())], [("sleep", 1)]),
        ([("sleep", (2,)), ("wake_up", (["weights"],))], [("sleep", 1)]),
        ([("sleep", (2,)), ("wake_up", (None,))], []),
        ([("sleep", (2,)), ("load_weights", ("x",))], [("load_weights", "x"), ("sleep", 1)]),
        ([("load_weights", ("x",)), ("load_weights", ("y",))], [("load_weights", "y")]),
        ([("sleep", (2,)), ("pause", ("keep",))], [("sleep", 2), ("pause", "keep")]),
        ([("observe", (-1, 1)), ("ping", ())], []),
        ([("add_lora", (A,)), ("pin_lora", (1,))], [("add_lora", A), ("pin_lora", 1)]),
        ([("add_lora", (A,)), ("pin_lora", (1,)), ("remove_lora", (1,))], []),
        # of those that are not pinned, the last ones that fit
        ([("add_lora", (A,)), ("add_lora", (B,))], [("add_lora", B)]),
        (
            [("add_lora", (A,)), ("pin_lora", (1,)), ("add_lora", (B,))],
            [("add_lora", A), ("pin_lora", 1)],
        ),
    ],
)
def test_calls(noted, calls) -> None:
    state = EngineState()
    for method, args in noted:
        state.note(method, args)
    assert state.calls() == calls


def test_every_utility_is_repeatable_or_known_not_to_be() -> None:
    once = {"collective_rpc", "start_trace", "wait_for_trace", "end_trace"}
    once |= {"hold_waves", "release_waves"}  # which replicas call, of engines that end together
    assert REPEATABLE | once == make_core().utilities.utilities.keys() and not REPEATABLE & once
