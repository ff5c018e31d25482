"""Accepts connections, and never more than the process has descriptors for.

Must not know: HTTP, what a connection sends.

uvicorn's own way accepts everything that waits before it looks at a limit: a burst of clients takes
the descriptors with which an engine is loaded or a file is read.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import uvicorn

from ..config import ServerConfig, most_connections

logger = logging.getLogger(__name__)
AT_ONCE = 64  # connections in one turn of the event loop
RETRY_S = 0.1  # after the system had no descriptor or no memory for a connection
LOG_INTERVAL_S = 10.0


class AcceptingServer(uvicorn.Server):
    """uvicorn's server with an Acceptor for its listening socket."""

    def __init__(self, config: uvicorn.Config, limits: ServerConfig):
        super().__init__(config)
        self._most_connections = most_connections(limits.max_connections)
        self._num_servers = limits.api_server_count

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """`sockets` are one or more that listen."""
        await self.lifespan.startup()
        make_protocol = functools.partial(
            self.config.http_protocol_class,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        self.servers: list[Any] = [
            Acceptor(
                listener,
                make_protocol,
                self.server_state.connections,
                self._most_connections,
                self.config.ssl,
                AT_ONCE if self._num_servers == 1 else 1,
            )
            for listener in sockets or []
        ]
        self.started = True


class Acceptor:
    """Accepts from `listener` until it is closed. `connections` are those that are open. Beyond
    `most`, a new one is closed at once. Without a descriptor, connections wait in the system.
    `at_once` are accepted in one turn of the event loop: one where several processes accept, so
    that none takes all of a burst.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], Any],
        connections: set[Any],
        most: int,
        ssl: Any = None,
        at_once: int = AT_ONCE,
    ):
        self._is_closed = False
        self._listener = listener
        self._make_protocol = make_protocol
        self._connections = connections
        self._most = most
        self._ssl = ssl
        self._at_once = at_once
        self._connecting: set[asyncio.Task] = set()  # accepted, in a handshake of TLS for example
        self._retry: asyncio.TimerHandle | None = None
        self._last_logged = -LOG_INTERVAL_S
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._loop.add_reader(listener.fileno(), self._on_readable)

    def close(self) -> None:
        self._is_closed = True
        self._loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()
        if self._ssl is not None:  # a handshake may take long
            for task in self._connecting:
                task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _on_readable(self) -> None:
        for _ in range(self._at_once):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # the client has left
                continue
            except OSError as error:
                self._pause(error)
                return
            if len(self._connections) + len(self._connecting) >= self._most:
                connection.close()
                continue
            connection.setblocking(False)
            task = self._loop.create_task(self._connect(connection))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, connection: socket.socket) -> None:
        """Makes the connection. It is not cancelled, except during a handshake: uvloop would make
        the connection all the same and never end it, and the server would wait for it.
        """
        try:
            _, protocol = await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._ssl
            )
        except OSError as error:  # also an SSLError: no handshake
            connection.close()
            logger.debug("a connection was not made: %s", error)
        else:
            if self._is_closed:  # uvicorn has ended the others meanwhile
                protocol.shutdown()

    def _pause(self, error: OSError) -> None:
        """Pauses. Without that, the event loop would try again at each turn."""
        self._loop.remove_reader(self._listener.fileno())
        self._retry = self._loop.call_later(RETRY_S, self._resume)
        if time.monotonic() - self._last_logged >= LOG_INTERVAL_S:
            self._last_logged = time.monotonic()
            logger.error("connections wait, since none can be accepted: %s", error.strerror)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._listener.fileno(), self._on_readable)
