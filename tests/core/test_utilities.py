"""Utilities are called by name, and only those that are listed."""

import pytest
from quire.ipc.errors import InvalidParameterError
from quire.tests.core.engine_loop import (
    make_core,
)


@pytest.mark.parametrize(
    "method",
    ["shutdown", "step_fn", "__init__", "_schedule", "drop_client", "no_such_thing", "", 5],
)
def test_only_the_listed_utilities_can_be_called(method):
    with pytest.raises(InvalidParameterError, match="method: must be one of add_lora, .* got"):
        make_core().call_utility(method, [])


def test_a_utility_with_wrong_arguments_is_refused():
    with pytest.raises(InvalidParameterError, match=r"args: ping does not take \[1\]"):
        make_core().call_utility("ping", [1])


def test_every_utility_of_waves_needs_experts_that_are_shared():
    for name in ("hold_waves", "release_waves"):
        with pytest.raises(InvalidParameterError, match=f"{name} needs enable_expert_parallel"):
            make_core().call_utility(name, [])
