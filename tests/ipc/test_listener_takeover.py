"""A daemon takes the address of another over, and the clients of the first continue on it."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from quire.ipc import listener
from quire.ipc.errors import QuireError
from quire.ipc.listener import listener_pid, taken_over
from quire.tests.fake_engine import COMMAND, Hold, daemon, wait_until
from quire.tests.fakes import make_config
from quire.tests.frontend.supervision.test_supervised_client import (
    Asyncio,
    Blocking,
    assert_expected,
    some_requests,
)


def replacing(address: str, config) -> subprocess.Popen:
    process = subprocess.Popen(
        [*COMMAND, "--listen", address, "--replace"], stdin=subprocess.PIPE, stderr=sys.stderr
    )
    process.stdin.write(msgspec.json.encode(config))
    process.stdin.close()
    return process


def test_streams_of_two_clients_continue(tmp_path: Path) -> None:
    """No token is lost, repeated or different."""
    hold = Hold(tmp_path, 40)  # until the second daemon is there
    config = make_config(hf_overrides={"delay_s": 0.01} | hold.overrides)
    hold.begin()
    results: dict[type, tuple] = {}
    has_begun = threading.Semaphore(0)

    def use(kind: type, address: str) -> None:
        engine = kind(address)
        try:
            requests = some_requests(6, max_tokens=190)
            has_begun.release()
            outputs = engine.generate(requests)
            results[kind] = requests, outputs, engine.client.engine_pid, engine.client.restarts
        finally:
            engine.close()

    with daemon(tmp_path, config) as (address, first):
        threads = [
            threading.Thread(target=use, args=(kind, address)) for kind in (Blocking, Asyncio)
        ]
        for thread in threads:
            thread.start()
            has_begun.acquire(timeout=60)
        second = replacing(address, config)
        try:
            wait_until(lambda: listener_pid(tmp_path / "engine.sock") == second.pid)
            hold.end()
            for thread in threads:
                thread.join(60)
            wait_until(lambda: first.poll() is not None)
            for requests, outputs, pid, restarts in results.values():
                assert_expected(requests, outputs, config)
                assert pid == second.pid and restarts.by_cause == {"daemon": 1}
            assert len(results) == 2 and listener_pid(tmp_path / "engine.sock") == second.pid
        finally:
            second.kill()
            second.wait()


def test_one_that_cannot_load_leaves_the_address_alone(tmp_path: Path) -> None:
    with daemon(tmp_path, make_config()) as (address, first):
        wait_until(lambda: listener_pid(tmp_path / "engine.sock") == first.pid)
        assert replacing(address, make_config(hf_overrides={"at_load": "fail"})).wait(60) == 1
        assert listener_pid(tmp_path / "engine.sock") == first.pid and first.poll() is None


def test_where_none_listens_it_listens_at_once(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with taken_over(path):
        pass
    process = replacing(f"ipc://{path}", make_config(hf_overrides={"at_load": "hang"}))
    try:
        wait_until(lambda: listener_pid(path) == process.pid, 60)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("is_busy", [True, False])
def test_the_old_daemon_ends(tmp_path: Path, is_busy: bool) -> None:
    with daemon(tmp_path, make_config(hf_overrides={"delay_s": 30.0})) as (address, first):
        if is_busy:
            threading.Thread(target=busy, args=(address,), daemon=True).start()
            wait_until(lambda: has_joined.is_set(), 60)
        wait_until(lambda: listener_pid(tmp_path / "engine.sock") == first.pid, 60)
        with taken_over(tmp_path / "engine.sock"):
            assert listener_pid(tmp_path / "engine.sock") is None
        assert first.wait(60) is not None


def test_one_whose_queue_is_full_still_listens(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "engine.sock"
    monkeypatch.setattr(listener, "CLOSE_TIMEOUT_S", 1.0)
    with daemon(tmp_path, make_config()) as (_, first), contextlib.ExitStack() as accepted:
        wait_until(lambda: listener_pid(path) == first.pid, 60)
        first.send_signal(signal.SIGSTOP)
        for _ in range(120):  # of 128 that may wait
            program = accepted.enter_context(
                socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            )
            program.connect(str(path))
        with pytest.raises(QuireError, match="does not stop listening"), taken_over(path):
            pass
        assert listener_pid(path) == 0


has_joined = threading.Event()


def busy(address: str) -> None:
    engine = Blocking(address, on_engine_death="fail")
    requests = some_requests(1)
    for request_id, (prompt, params) in requests.items():
        engine.llm.add_request(request_id, prompt, params)
    has_joined.set()
