"""Starting an engine, blocking and in an event loop: the same progress and errors, and no leak
after a failure or cancellation.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time

import psutil
import pytest
from quire.frontend.clients.own_loop import run_once
from quire.ipc import handshake
from quire.ipc.errors import EngineStartError, InvalidParameterError, RemoteTraceback
from quire.ipc.handshake import open_connection
from quire.tests.fake_engine import COMMAND, daemon, is_gone, wait_until
from quire.tests.fakes import make_config


def opened_blocking(engine: str, command, reports, **arguments):
    return run_once(
        open_connection(
            make_config(**arguments),
            engine,
            lambda stage, fraction: reports.append((stage, fraction)),
            epoch=3,
            command=command,
        )
    )


def opened_in_a_loop(engine: str, command, reports, **arguments):
    def report(stage: str, fraction: float) -> None:
        assert threading.current_thread() is threading.main_thread()
        reports.append((stage, fraction))

    async def main():
        ticks: list[float] = []
        ticker = asyncio.create_task(tick(ticks))
        made = await open_connection(
            make_config(**arguments), engine, report, epoch=3, command=command
        )
        ticker.cancel()
        assert len(ticks) > 1 or engine != "process"  # attaching takes no time
        return made

    return asyncio.run(main())


async def tick(ticks: list[float]) -> None:
    """Show that the event loop is not blocked."""
    while True:
        await asyncio.sleep(0.005)
        ticks.append(time.monotonic())


@pytest.fixture(params=[opened_blocking, opened_in_a_loop], ids=["blocking", "in a loop"])
def open_(request):
    threads, children = set(threading.enumerate()), psutil.Process().children()
    connections = []

    def open_one(engine: str = "process", command=COMMAND, **arguments):
        reports: list[tuple[str, float]] = []
        connection, ready = request.param(
            engine, command, reports, **{"startup_timeout_s": 120.0, **arguments}
        )
        connections.append(connection)
        return connection, ready, reports

    open_one.is_async = request.param is opened_in_a_loop
    yield open_one
    for connection in connections:
        connection.close()
    assert psutil.Process().children() == children
    wait_until(lambda: set(threading.enumerate()) <= threads)


def test_a_child(open_):
    connection, ready, reports = open_()
    assert (
        ready.epoch == 3
        and ready.config == make_config(startup_timeout_s=120.0)
        and connection.process is not None
    )
    if open_.is_async:
        loading = [
            ("load weights", 0.5),
            ("load weights", 1.0),
            ("kv cache", 0.0),
            ("kv cache", 1.0),
        ]
        assert reports == [("start", 0.0), ("start", 1.0), *loading]


def test_a_daemon(open_, tmp_path):
    with daemon(tmp_path, make_config()) as (address, process):
        connection, ready, _ = open_(address)
        assert connection.engine_pid == process.pid and ready.config == make_config()
        connection.close()


@pytest.mark.parametrize(
    ("trouble", "expected", "text"),
    [
        ("fail", ValueError, "made of cheese"),
        ("die", EngineStartError, "last stage: .*SIGKILL"),
        (
            "exit",
            EngineStartError,
            "exited with code 7; last lines of its stderr:\n    famous last words",
        ),
    ],
)
def test_failures(open_, trouble, expected, text):
    with pytest.raises(expected, match=text) as caught:
        open_(hf_overrides={"at_load": trouble})
    assert (trouble != "fail") or isinstance(caught.value.__cause__, RemoteTraceback)


def test_a_failure_that_is_seen_when_the_time_is_over_is_named(monkeypatch):
    """As on a busy machine: this process sees the engine's death, and its last words later."""
    take, reports, is_late = handshake._take, [], []

    def take_late(connection, source):
        if is_late or not any(stage == "load weights" for stage, _ in reports):
            undo.undo()
            return take(connection, source)
        is_late.append(True)
        wait_until(lambda: is_gone(connection.engine_pid) and source.poll(0))
        undo.setattr(handshake, "LAST_MESSAGES_S", 0.0)  # of this one wait

    undo = pytest.MonkeyPatch()
    monkeypatch.setattr(handshake, "_take", take_late)
    with pytest.raises(ValueError, match="made of cheese"):
        opened_blocking("process", COMMAND, reports, hf_overrides={"at_load": "fail"})
    assert is_late


@pytest.mark.sampled(step=2)
def test_the_deadline(open_):
    with pytest.raises(EngineStartError, match="did not answer in time .*startup_timeout_s"):
        open_(hf_overrides={"at_load": "hang"}, startup_timeout_s=1.5)


def test_no_engine(open_, tmp_path):
    with pytest.raises(EngineStartError, match="(?s)it sent no HELLO.*No module named"):
        open_(command=[sys.executable, "-m", "quire.no_such_engine"])
    with pytest.raises(EngineStartError, match="no engine listens"):
        open_(f"ipc://{tmp_path}/nobody")
    with pytest.raises(InvalidParameterError, match="ipc://PATH"):
        open_("tcp://localhost:1")


def test_a_report_that_raises_cancels_the_start():
    def report(stage: str, fraction: float) -> None:
        if stage == "load weights":
            raise KeyError(stage)

    before = psutil.Process().children()
    with pytest.raises(KeyError):
        asyncio.run(open_connection(make_config(), "process", report, command=COMMAND))
    assert psutil.Process().children() == before
