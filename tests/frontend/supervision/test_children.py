"""Children that are watched, and the end of one that does not listen."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

from quire.frontend.supervision.children import (
    Child,
    wait_for_end,
    wait_for_news,
)
from quire.frontend.supervision.restart_budget import RestartBudget
from quire.ipc.errors import EngineStartError
from quire.ipc.process import SignalPipe
from quire.ipc.systemd import Notices

DEAF = """
import signal, time
from quire.ipc.systemd import Notifier
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Notifier().ready(X_FACT=7)
time.sleep(1000)
"""


def start(child: Child, path: Path, program: str, **limits: float):
    command = [sys.executable, "-P", "-c", program]
    return child.start(partial(Notices, path, **limits), command, b"", os.environ)


def test_a_signal_ends_the_wait_for_one_that_does_not_end(tmp_path: Path) -> None:
    child = Child("one", "process one", RestartBudget(5))
    before = signal.getsignal(signal.SIGTERM)
    signals = SignalPipe(signal.SIGTERM)
    try:
        assert start(child, tmp_path / "notices", DEAF) is None
        while not child.is_ready:
            wait_for_news([child], signals, child.due_at)
        assert child.facts["X_FACT"] == "7" and not child.is_over()
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for_end([child], signals, 1000.0)  # it does not wait for so long
        assert child.process is None
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)
        signals.close()


def test_one_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    child = Child("one", "process one", RestartBudget(5))
    sleep = "import time; time.sleep(1000)"
    assert start(child, tmp_path / "notices", sleep, start_limit_s=0.0) is None
    child.end_if_late(0.0, 1.0)
    assert child.has_died() and "was killed by SIG" in child.clear()


def test_what_cannot_be_started_is_tried_again_after_the_first_time(tmp_path: Path) -> None:
    child = Child("one", "process one", RestartBudget(5))
    too_long = tmp_path / ("x" * 200)
    assert isinstance(start(child, too_long, DEAF), EngineStartError)
    child.num_starts = 1
    assert start(child, too_long, DEAF) is None and child.process is None
    assert not list(tmp_path.iterdir())
