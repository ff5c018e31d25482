"""Requests and what they hold."""

import msgspec
import pytest
from quire.core.scheduling.state import count_end
from quire.ipc.counters import EngineCounters
from quire.ipc.messages import FinishReason


@pytest.mark.parametrize("reason", FinishReason)
def test_a_finished_request_is_counted_once_under_its_reason(reason: FinishReason) -> None:
    counters = EngineCounters()
    count_end(counters, reason)
    assert {name: value for name, value in msgspec.structs.asdict(counters).items() if value} == {
        f"num_finished_{reason}": 1
    }
