"""Watchdog: asks, shows the stacks, ends; an answer begins it again."""

from __future__ import annotations

from quire.frontend.clients.watchdog import DOUBT_TIMEOUT_S, Step, Watchdog


def test_silence_ends_the_engine_and_an_answer_does_not() -> None:
    now = 0.0
    watchdog = Watchdog(2.0, lambda: now)
    assert watchdog.check() is Step.ASK
    now = 1.9
    assert watchdog.check() is Step.WAIT
    watchdog.heard()
    now = 10.0  # nothing was asked since
    assert watchdog.check() is Step.ASK
    now = 12.0
    assert watchdog.check() is Step.SHOW_STACKS
    now = 12.5
    assert watchdog.check() is Step.END


def test_an_answer_after_the_stacks_saves_the_engine() -> None:
    now = 0.0
    watchdog = Watchdog(1.0, lambda: now)
    assert watchdog.check() is Step.ASK
    now = 1.0
    assert watchdog.check() is Step.SHOW_STACKS
    watchdog.heard()
    now = 5.0
    assert [watchdog.check(), watchdog.check()] == [Step.ASK, Step.WAIT]


def test_in_doubt_it_waits_for_a_short_time_only() -> None:
    now = 0.0
    watchdog = Watchdog(60.0, lambda: now)
    assert watchdog.check() is Step.ASK
    now = 30.0
    watchdog.doubt()
    assert watchdog.check() is Step.WAIT
    now = 31.0
    watchdog.doubt()  # again; the time that is left does not change
    now = 30.0 + DOUBT_TIMEOUT_S
    assert [watchdog.check(), watchdog.check()] == [Step.SHOW_STACKS, Step.END]
    watchdog.heard()
    assert [watchdog.check(), watchdog.check()] == [Step.ASK, Step.WAIT]
