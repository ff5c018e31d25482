"""The engine's counters are the first fields of SchedulerStats. A finished request is counted under
its reason.
"""

from msgspec import structs
from quire.ipc.counters import (
    TEXTS,
    TEXTS_UNDER_THEIR_NAMES,
    EngineCounters,
    SchedulerStats,
    make_stats,
)

GAUGES = ["num_running", "num_waiting", "num_swapped", "num_free_blocks", "num_blocks"]


def test_each_counter_is_a_field_of_the_statistics_before_the_gauges() -> None:
    names = EngineCounters.__struct_fields__
    assert [*names, *GAUGES] == list(SchedulerStats.__struct_fields__)
    counters = EngineCounters(**{name: 100 + i for i, name in enumerate(names)})
    gauges = {name: i for i, name in enumerate(GAUGES)}
    stats = make_stats(*structs.astuple(counters), *gauges.values())
    assert structs.asdict(stats) == structs.asdict(counters) | gauges


def test_every_counter_has_a_sentence() -> None:
    assert all(text.endswith(".") and len(text) > 10 for text in TEXTS.values())
    assert TEXTS_UNDER_THEIR_NAMES.items() <= TEXTS.items()
