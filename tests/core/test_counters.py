"""The engine's counters are fields of SchedulerStats. A finished request is counted under its
reason.
"""

from dataclasses import asdict, fields

import pytest
from msgspec import structs
from quire.core.counters import Counters
from quire.ipc.messages import FinishReason, SchedulerStats

GAUGES = (
    "num_running",
    "num_waiting",
    "num_free_blocks",
    "num_blocks",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_swapped",
)


def test_each_counter_is_a_field_of_the_statistics():
    names = [field.name for field in fields(Counters)]
    assert sorted([*names, *GAUGES]) == sorted(SchedulerStats.__struct_fields__)
    counters = Counters(**{name: 100 + i for i, name in enumerate(names)})
    gauges = {name: i for i, name in enumerate(GAUGES)}
    assert structs.asdict(counters.stats(**gauges)) == gauges | asdict(counters)


@pytest.mark.parametrize("reason", FinishReason)
def test_a_finished_request_is_counted_once_under_its_reason(reason):
    counters = Counters()
    counters.count_end(reason)
    assert {name: value for name, value in asdict(counters).items() if value} == {
        f"num_finished_{reason}": 1
    }
