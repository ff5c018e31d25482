"""The acceptor: as many connections as it may have, and a system that has no descriptors."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
import uvloop
from quire.frontend.server.config import most_connections
from quire.frontend.server.http import acceptor
from quire.frontend.server.http.acceptor import Acceptor

MOST = 5


class Greeting(asyncio.Protocol):
    """Says hi, and stays among `connections` until it is closed."""

    def __init__(self, connections: set[asyncio.Protocol]):
        self._connections = connections

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._connections.add(self)
        transport.write(b"hi")

    def shutdown(self) -> None:
        """As uvicorn calls it at the end of a server."""
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)


class Listener(socket.socket):
    """A listening socket whose next accepts fail for want of descriptors."""

    num_failures = 0

    def accept(self):
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


@contextmanager
def listening() -> Iterator[Listener]:
    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(100)
        yield listener


def accepting(test: Callable[[Listener, set], Awaitable[None]]) -> None:
    async def run() -> None:
        connections: set[asyncio.Protocol] = set()
        with listening() as listener:
            accepts = Acceptor(listener, lambda: Greeting(connections), connections, MOST)
            await asyncio.wait_for(test(listener, connections), 60)
            accepts.close()
            await accepts.wait_closed()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def read_of(listener: Listener) -> tuple[bytes, asyncio.StreamWriter]:
    """What a new client reads: nothing if it is closed at once."""
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        return await reader.read(2), writer
    except ConnectionError:
        return b"", writer


def test_no_more_connections_than_it_may_have() -> None:
    async def test(listener: Listener, connections: set) -> None:
        clients = await asyncio.gather(*(read_of(listener) for _ in range(4 * MOST)))
        assert sorted(text for text, _ in clients) == [b""] * 3 * MOST + [b"hi"] * MOST
        assert len(connections) == MOST
        for _, writer in clients:
            writer.close()
        while connections:
            await asyncio.sleep(0.01)
        text, writer = await read_of(listener)
        assert text == b"hi"
        writer.close()

    accepting(test)


def test_without_descriptors_a_client_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def test(listener: Listener, connections: set) -> None:
        listener.num_failures = 3
        text, writer = await read_of(listener)
        assert text == b"hi" and listener.num_failures == 0
        writer.close()

    caplog.set_level(logging.ERROR, acceptor.__name__)
    accepting(test)
    assert caplog.messages == ["connections wait, since none can be accepted: Too many open files"]


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connections_that_come_during_the_end_are_ended(new_loop: Callable) -> None:
    """Else the server would wait for them."""

    async def run() -> None:
        connections: set[asyncio.Protocol] = set()
        with listening() as listener:
            accepts = Acceptor(listener, lambda: Greeting(connections), connections, MOST)
            clients = [socket.create_connection(listener.getsockname()) for _ in range(MOST)]
            accepts._on_readable()
            await asyncio.sleep(0)  # they are being made
            accepts.close()
            await accepts.wait_closed()
            async with asyncio.timeout(60):
                while connections:
                    await asyncio.sleep(0.01)
            for client in clients:
                client.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())


@pytest.mark.parametrize(("max_connections", "most"), [(1, 2), (3, 5), (95, 127), (4096, 4352)])
def test_spare_connections_are_a_third_at_most(max_connections: int, most: int) -> None:
    assert most_connections(max_connections) == most
