"""Messages of an engine that are lost or changed on their way: it is taken for dead, and its
requests continue on the next one.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading

import pytest
from quire.frontend.clients import mp_client
from quire.ipc import connection
from quire.ipc.process import EngineProcess
from quire.ipc.sockets import Wire, receive
from quire.tests.frontend.supervision.test_supervised_client import (
    Asyncio,
    Blocking,
    assert_expected,
    some_requests,
)


class Relay:
    """Stands between engines and their clients. With `changes` set, it changes a bit of what the
    engine sends next.
    """

    def __init__(self) -> None:
        self.changes = threading.Event()

    def start_engine(self, command, wire_name: str, key: bytes, *rest) -> EngineProcess:
        """As EngineProcess, whose place it takes."""
        outer, inner = Wire(secrets.token_hex(16), key), Wire(wire_name, key)
        for is_output in (False, True):
            ends = [w.output_address if is_output else w.input_address for w in (outer, inner)]
            listener = socket.socket(socket.AF_UNIX)
            listener.bind("\0" + ends[0].partition("@")[2])
            listener.listen()
            threading.Thread(
                target=self._accept, args=(listener, ends[1], is_output), daemon=True
            ).start()
        return EngineProcess(command, outer.name, key, *rest)

    def _accept(self, listener: socket.socket, address: str, is_output: bool) -> None:
        with listener, contextlib.suppress(OSError):
            engine, _ = listener.accept()
            client = socket.socket(socket.AF_UNIX)
            client.connect("\0" + address.partition("@")[2])
            threading.Thread(target=self._copy, args=(client, engine, False), daemon=True).start()
            self._copy(engine, client, is_output)

    def _copy(self, source: socket.socket, target: socket.socket, is_output: bool) -> None:
        with source, target, contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if is_output and self.changes.is_set():
                    self.changes.clear()
                    data = data[:-1] + bytes([data[-1] ^ 1])
                target.sendall(data)


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("kind", [Blocking, Asyncio])
def test_a_changed_message_ends_the_engine_and_requests_continue(kind: type, monkeypatch) -> None:
    """Long before step_timeout_s."""
    relay = Relay()
    monkeypatch.setattr(connection, "EngineProcess", relay.start_engine)
    engine = kind(hf_overrides={"delay_s": 0.01})
    try:
        requests = some_requests(4, max_tokens=100)
        timer = threading.Timer(0.2, relay.changes.set)
        timer.start()
        outputs = engine.generate(requests)
        assert_expected(requests, outputs, engine.client.ready.config)
        assert engine.client.restarts.by_cause == {"hang": 1} and not relay.changes.is_set()
    finally:
        engine.close()


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("kind", [Blocking, Asyncio])
def test_a_lost_message_is_noticed(kind: type, monkeypatch) -> None:
    num_received = 0

    def receive_but_one(source):
        nonlocal num_received
        frames = receive(source)
        if frames is not None:
            num_received += 1
            if num_received == 20:
                return receive(source)
        return frames

    monkeypatch.setattr(mp_client, "receive", receive_but_one)
    engine = kind(hf_overrides={"delay_s": 0.01})
    try:
        requests = some_requests(4, max_tokens=100)
        outputs = engine.generate(requests)
        assert_expected(requests, outputs, engine.client.ready.config)
        assert engine.client.restarts.by_cause == {"hang": 1}
    finally:
        engine.close()
