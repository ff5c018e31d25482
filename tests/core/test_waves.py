"""Waves: what one engine does. tests/frontend/clients/replicas/test_waves.py has several engines
and their coordinator, tests/test_expert_parallel.py the processes.
"""

from __future__ import annotations

import pytest
from quire.core.waves import WaveState
from quire.ipc.messages import WaveReport


def test_a_wave_is_asked_for_once_and_ends_once() -> None:
    state = WaveState()
    assert not state.wants(False) and state.wants(True)
    assert state.ask() == WaveReport(0, 1)
    assert not state.wants(True)  # it is asked for
    state.start(1)
    assert state.is_running and not state.wants(True)
    state.start(1)  # for another engine's request, too
    assert state.end() == WaveReport(1)
    assert not state.is_running and state.wants(True)


def test_a_start_that_comes_late_starts_nothing() -> None:
    state = WaveState()
    state.start(1)
    state.end()
    state.start(1)
    assert not state.is_running
    state.start(2)
    assert state.is_running


def test_a_request_for_a_wave_that_has_just_ended_wakes_again() -> None:
    state = WaveState()
    state.start(1)  # by the coordinator, without being asked
    state.end()
    assert state.wants(True) and state.ask() == WaveReport(1, 2)


def test_a_wave_cannot_be_skipped() -> None:
    state = WaveState()
    with pytest.raises(ValueError, match="wave 2 is started, and 0 have ended"):
        state.start(2)
