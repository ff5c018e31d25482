"""Starts an engine or attaches to one: HELLO → CONFIG → PROGRESS … → READY or FAILED.

Must not know: requests, or what an engine does while it loads.

`_converse` holds the conversation and yields what it waits for. `open_connection` waits by
blocking, `open_connection_async` in an event loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import zmq

from .config import EngineConfig
from .connection import Connection
from .early_engine import take as take_early_engine
from .errors import EngineStartError
from .failures import unpack_exception
from .messages import PROTOCOL, Config, EngineDead, Failed, Hello, Progress, Ready
from .process import engine_command, readable
from .sockets import ipc_path, receive
from .threads import in_thread

LAST_WORDS_S = 0.1  # how long a dead engine's last messages may take to arrive
HELLO_TIMEOUT_S = 10.0  # for a daemon, whose input thread answers at once

Report = Callable[[str, float], None]


class Awaited(NamedTuple):
    """What the conversation waits for."""

    source: zmq.Socket
    deadline: float  # by time.monotonic()
    where: str  # the current stage, for errors


def open_connection(
    config: EngineConfig,
    engine: str,
    on_progress: Report,
    *,
    epoch: int = 0,
    engine_index: int = 0,
    command: Sequence[str] | None = None,
) -> tuple[Connection, Ready]:
    """Starts an engine ("process": `command`, or Quire's own) or attaches to the daemon at the
    address
    `engine`. Returns when it is ready.

    Raises the engine's own exception if it cannot start, or EngineStartError if it dies or exceeds
    startup_timeout_s.
    """
    deadline = time.monotonic() + config.service_config.startup_timeout_s
    connection = _make_connection(config, engine, command)
    try:
        if engine == "process":
            _ensure_process(connection, config, command)
        else:
            connection.attach(engine, config.service_config.token_file)
        conversation = _converse(connection, config, epoch, engine_index, deadline, on_progress)
        awaited = next(conversation)
        while True:
            awaited = conversation.send(_receive(connection, awaited))
    except StopIteration as end:
        return connection, end.value
    except BaseException:
        connection.shutdown_timeout_s = 0.0  # it has nothing to save
        connection.close()
        raise


async def open_connection_async(
    config: EngineConfig,
    engine: str,
    on_progress: Report,
    *,
    epoch: int = 0,
    engine_index: int = 0,
    command: Sequence[str] | None = None,
) -> tuple[Connection, Ready]:
    """As open_connection, without blocking the running loop.

    On cancellation it ends a child before it raises.
    """
    deadline = time.monotonic() + config.service_config.startup_timeout_s
    connection = _make_connection(config, engine, command)
    try:
        if engine == "process":
            _ensure_process(connection, config, command)
        else:
            token_file = config.service_config.token_file
            await in_thread(lambda: connection.attach(engine, token_file))
        conversation = _converse(connection, config, epoch, engine_index, deadline, on_progress)
        awaited = next(conversation)
        while True:
            message = await _receive_async(connection, awaited)
            try:
                awaited = conversation.send(message)
            except StopIteration as end:  # StopIteration must not leave a coroutine
                return connection, end.value
    except BaseException:
        connection.shutdown_timeout_s = 0.0
        await in_thread(connection.close)
        raise


def _make_connection(
    config: EngineConfig, engine: str, command: Sequence[str] | None
) -> Connection:
    if engine != "process":
        ipc_path(engine)
    early = take_early_engine() if engine == "process" and command is None else None
    connection = early or Connection(config.service_config.max_message_bytes)
    connection.shutdown_timeout_s = config.service_config.shutdown_timeout_s
    return connection


def _ensure_process(
    connection: Connection, config: EngineConfig, command: Sequence[str] | None
) -> None:
    if connection.process is None:
        connection.spawn(command or engine_command(), config.service_config.max_message_bytes)


def _converse(
    connection: Connection,
    config: EngineConfig,
    epoch: int,
    engine_index: int,
    deadline: float,
    report: Report,
) -> Generator[Awaited, Any, Ready]:
    """Receives each message; returns the engine's Ready."""
    is_child = connection.process is not None
    report("start", 0.0)
    hello = None
    while not isinstance(hello, Hello):
        hello = yield Awaited(
            connection.router,
            deadline if is_child else min(deadline, time.monotonic() + HELLO_TIMEOUT_S),
            "it sent no HELLO",
        )
    if hello.protocol != PROTOCOL:
        raise EngineStartError(
            f"the engine speaks protocol {hello.protocol}, this program {PROTOCOL}: their versions "
            f"of quire differ"
        )
    if is_child:
        connection.send(Config(config, epoch, engine_index))
    report("start", 1.0)
    stage = "start"
    while True:
        message = yield Awaited(connection.pull, deadline, f"last stage: {stage}")
        if isinstance(message, Ready):
            return message
        if isinstance(message, Failed):
            raise unpack_exception(message, EngineStartError)
        if isinstance(message, Progress):
            stage = f"{message.stage}, {message.fraction:.0%}"
            report(message.stage, message.fraction)


# ---------------------------------------------------------------- two ways of waiting


def _receive(connection: Connection, awaited: Awaited) -> Any:
    """The next message. Raises EngineStartError at the deadline, or when the engine dies."""
    source, poller = awaited.source, zmq.Poller()
    poller.register(source, zmq.POLLIN)
    poller.register(connection.pidfd, zmq.POLLIN)
    while (message := _take(connection, source)) is None:
        ready = dict(poller.poll(max(0, int((awaited.deadline - time.monotonic()) * 1000))))
        if not ready:
            raise _too_late(awaited)
        # the engine is dead; read its messages first
        if source not in ready and not source.poll(int(LAST_WORDS_S * 1000)):
            raise _died(connection, awaited)
    return message


async def _receive_async(connection: Connection, awaited: Awaited) -> Any:
    """As _receive, in an event loop."""
    import asyncio

    loop, news, is_dead, deadline = (
        asyncio.get_running_loop(),
        asyncio.Event(),
        False,
        awaited.deadline,
    )
    watched = (awaited.source.FD, connection.pidfd)
    for fd in watched:
        loop.add_reader(fd, news.set)
    try:
        # ZMQ's descriptor is edge-triggered: check before each wait
        while (message := _take(connection, awaited.source)) is None:
            if not is_dead and readable(connection.pidfd, timeout_s=0):
                is_dead, deadline = True, time.monotonic() + LAST_WORDS_S
                loop.remove_reader(connection.pidfd)
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await news.wait()
            except TimeoutError:
                raise (_died(connection, awaited) if is_dead else _too_late(awaited)) from None
            news.clear()
        return message
    finally:
        for fd in watched:
            loop.remove_reader(fd)


def _take(connection: Connection, source: zmq.Socket) -> Any:
    """A message that has already arrived, or None."""
    while (frames := receive(source)) is not None:
        message = connection.decode(frames[1:] if source is connection.router else frames)
        if isinstance(message, EngineDead):
            raise EngineStartError(message.cause)
        if message is not None:
            return message
    return None


def _too_late(awaited: Awaited) -> EngineStartError:
    return EngineStartError(
        f"the engine did not answer in time ({awaited.where}); startup_timeout_s gives it longer"
    )


def _died(connection: Connection, awaited: Awaited) -> EngineStartError:
    return EngineStartError(f"{awaited.where}: {connection.describe_death()}")


def report_nothing(stage: str, fraction: float) -> None:
    pass
