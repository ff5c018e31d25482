"""Waves: when engines that share experts compute. Each of their passes is one of all engines, so
they run step by step together while any has work, and wait for messages otherwise.

Must not know: torch, sockets, how engines meet, who coordinates them.

    coordinator   StartWave(n) ─▶ all engines
    engines       meet, pass, meet, pass, … meet: none has work        the wave n has ended
                  ─▶ coordinator: WaveReport(ended=n)
    an engine that has work while no wave runs ─▶ coordinator: WaveReport(wanted=n + 1)

The meetings decide, so a wave ends on all engines at the same boundary between steps. The
coordinator's messages arrive in the same order everywhere. So an engine never waits for another
that does not come. An engine that is held has no work: when all are, the wave ends, and what
follows (a pause, other weights) happens to all at that boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..ipc.messages import EngineCoreOutputs, WaveReport
from .pause import PauseControl
from .scheduling.step import ScheduledStep


class WaveState:
    """The waves as one engine knows them."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.is_running = False
        self._num_wanted = 0

    def start(self, number: int) -> None:
        """The coordinator has started a wave. One that has ended is not started again."""
        if number > self.num_ended + 1:
            raise ValueError(f"wave {number} is started, and {self.num_ended} have ended")
        self.is_running |= number == self.num_ended + 1

    def wants(self, has_work: bool) -> bool:
        """Whether the coordinator must be asked for a wave, which is done once for each."""
        return has_work and not self.is_running and self._num_wanted <= self.num_ended

    def ask(self) -> WaveReport:
        self._num_wanted = self.num_ended + 1
        return WaveReport(self.num_ended, self._num_wanted)

    def end(self) -> WaveReport:
        """The engines have met, and none has work."""
        self.num_ended, self.is_running = self.num_ended + 1, False
        return WaveReport(self.num_ended)


class EngineWaves:
    """The waves of an EngineCore. `step` replaces the engine's own."""

    def __init__(
        self,
        executor: Any,
        pausing: PauseControl,
        *,
        schedule: Callable[[], ScheduledStep | None],
        execute: Callable[[ScheduledStep], None],
        take_rows: Callable[..., dict[int, EngineCoreOutputs] | None],
        report: Callable[[WaveReport], None],
        is_full: Callable[[], bool],
    ):
        """executor: a SharingExecutor. schedule, execute, take_rows: the parts of a step. report:
        sends a message to the coordinator. is_full: whether rows must be read before there are
        more.
        """
        self.state = WaveState()
        self.is_held = False
        self.num_joined = 0  # passes of other engines that this one took part in, without work
        self._executor = executor
        self._pausing = pausing
        self._schedule = schedule
        self._execute = execute
        self._take_rows = take_rows
        self._report = report
        self._is_full = is_full
        self._step: ScheduledStep | None = None  # between `begin` and `finish`
        executor.join_engines()
        pausing.set_turn(False)

    def start(self, number: int) -> None:
        """See WaveState.start."""
        self.state.start(number)

    def has_work(self) -> bool:
        """Whether `step` must be called: in a wave always."""
        return self.state.is_running or self.state.wants(self._may_compute())

    def _may_compute(self) -> bool:
        return not (self.is_held or self._is_full()) and self._pausing.has_requests()

    def step(self) -> tuple[dict[int, EngineCoreOutputs] | None, bool]:
        """Replaces EngineCore's step: takes part in a pass of all engines, if a wave runs."""
        has_work = self.begin()
        has_step = self._step is not None
        if self.state.is_running:
            self.finish(self._executor.meet_engines(has_work))
        return self._take_rows(everything=not has_step), has_step

    def begin(self) -> bool:
        """What comes before the engines meet. Returns whether this one has work, and asks for a
        wave if it does.
        """
        self._pausing.set_turn(self.state.is_running and not self.is_held and not self._is_full())
        self._step = self._schedule()
        self._pausing.set_turn(False)
        has_work = self._step is not None or self._may_compute()
        if self.state.wants(has_work):
            self._report(self.state.ask())
        return has_work

    def finish(self, any_has_work: bool) -> None:
        """What follows when they have met: the pass, or the end of the wave."""
        step, self._step = self._step, None
        if not any_has_work:
            self._report(self.state.end())
        elif step is None:
            self._executor.join_pass()
            self.num_joined += 1
        else:
            self._execute(step)

    def hold_waves(self) -> Future:
        """Computes nothing until `release_waves`. The result comes when no wave runs."""
        self.is_held = True
        return self._pausing.when(lambda: not self.state.is_running)

    def release_waves(self) -> None:
        """Ends `hold_waves`."""
        self.is_held = False

    def describe(self) -> dict[str, int]:
        return {"ended": self.state.num_ended, "joined_passes": self.num_joined}
