"""What systemd receives."""

from __future__ import annotations

import math
import socket

from quire.ipc.systemd import Notifier
from quire.tests.fake_engine import daemon, wait_until
from quire.tests.fakes import make_config


def test_nothing_is_sent_without_systemd(monkeypatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    monkeypatch.setenv("WATCHDOG_USEC", "1000")
    notifier = Notifier()
    notifier.ready()
    notifier.works()
    assert notifier.due == math.inf


def test_a_daemon_is_ready_and_works_while_it_is_idle(monkeypatch, tmp_path) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as received:
        received.bind(path)
        received.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        monkeypatch.setenv("WATCHDOG_USEC", "100000")
        with daemon(tmp_path, make_config()) as (_, process):
            assert received.recv(100) == b"READY=1\nX_QUIRE_NUM_BLOCKS=257"
            assert [received.recv(100) for _ in range(3)] == [b"WATCHDOG=1"] * 3
            process.terminate()
            wait_until(lambda: process.poll() is not None)
