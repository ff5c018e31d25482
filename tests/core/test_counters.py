"""The engine's counters are fields of SchedulerStats, and an end is counted under its reason.
May know: Counters, the messages.
Must not know: who counts."""

from dataclasses import fields

import pytest
from quire.core.counters import Counters
from quire.ipc.messages import FinishReason, SchedulerStats


def test_each_counter_is_a_field_of_the_statistics():
    counters = Counters(num_preemptions=3, num_failed_utilities=5)
    stats = SchedulerStats(num_running=1, **counters.as_dict())
    assert (stats.num_running, stats.num_preemptions, stats.num_failed_utilities) == (1, 3, 5)
    assert counters.as_dict().keys() == {field.name for field in fields(Counters)}


@pytest.mark.parametrize("reason", FinishReason)
def test_an_end_is_counted_once_under_its_reason(reason):
    counters = Counters()
    counters.count_end(reason)
    assert {name: value for name, value in counters.as_dict().items() if value} == {f"num_finished_{reason}": 1}
