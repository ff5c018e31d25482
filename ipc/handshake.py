"""Starts an engine or attaches to one: HELLO → CONFIG → PROGRESS … → READY or FAILED.

Must not know: requests, or what an engine does while it loads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq

from .config import EngineConfig
from .connection import Connection
from .early_engine import take_early_engine
from .errors import EngineStartError
from .failures import unpack_exception
from .messages import PROTOCOL, Config, EngineDead, Failed, Hello, Progress, Ready
from .process import engine_command, readable
from .sockets import ipc_path, receive
from .threads import in_thread

LAST_MESSAGES_S = 0.1  # how long a dead engine's last messages may take to arrive
HELLO_TIMEOUT_S = 10.0  # for a daemon, whose input thread answers at once

Report = Callable[[str, float], None]


async def open_connection(
    config: EngineConfig,
    engine: str,
    on_progress: Report,
    *,
    epoch: int = 0,
    engine_index: int = 0,
    command: Sequence[str] | None = None,
    waiting: Connection | None = None,
) -> tuple[Connection, Ready]:
    """Starts an engine ("process": `command`, or Quire's own) or attaches to the daemon at the
    address `engine`. Returns when it is ready. waiting: the process runs already and has no
    configuration.

    Raises the engine's own exception if it cannot start, or EngineStartError if it dies or exceeds
    startup_timeout_s. On cancellation it ends a child before it raises.
    """
    service = config.service_config
    deadline = time.monotonic() + service.startup_timeout_s
    if engine != "process":
        ipc_path(engine)
    if waiting is None and engine == "process" and command is None:
        waiting = take_early_engine()
    connection = waiting or Connection(service.max_message_bytes)
    try:
        if engine != "process":
            await in_thread(partial(connection.attach, engine, service.token_file))
        elif connection.process is None:
            connection.spawn(command or engine_command(), service.max_message_bytes)
        first = Config(config, epoch, engine_index)
        ready = await _converse(connection, first, deadline, on_progress)
        return connection, ready
    except BaseException:
        await in_thread(connection.close)
        raise


async def _converse(
    connection: Connection, config: Config, deadline: float, report: Report
) -> Ready:
    is_child = connection.process is not None
    report("start", 0.0)
    hello, until = None, deadline
    if not is_child:
        until = min(deadline, time.monotonic() + HELLO_TIMEOUT_S)
    while not isinstance(hello, Hello):
        hello = await _receive(connection, connection.router, until, "it sent no HELLO")
    if hello.protocol != PROTOCOL:
        raise EngineStartError(
            f"the engine speaks protocol {hello.protocol}, this program {PROTOCOL}: their versions "
            f"of quire differ"
        )
    if is_child:
        connection.send(config)
    report("start", 1.0)
    stage = "start"
    while True:
        message = await _receive(connection, connection.pull, deadline, f"last stage: {stage}")
        if isinstance(message, Ready):
            return message
        if isinstance(message, Failed):
            raise unpack_exception(message, EngineStartError)
        if isinstance(message, Progress):
            stage = f"{message.stage}, {message.fraction:.0%}"
            report(message.stage, message.fraction)


async def _receive(connection: Connection, source: zmq.Socket, deadline: float, where: str) -> Any:
    """The next message. Raises EngineStartError at the deadline (by time.monotonic()), or when the
    engine dies; the error names `where`, the current stage.
    """
    loop = asyncio.get_running_loop()
    news = asyncio.Event()
    is_dead = False
    watched = (source.FD, connection.pidfd)
    for fd in watched:
        loop.add_reader(fd, news.set)
    try:
        # ZMQ's descriptor is edge-triggered: check before each wait
        while (message := _take(connection, source)) is None:
            if not is_dead and readable(connection.pidfd, timeout_s=0):
                is_dead = True
                deadline = time.monotonic() + LAST_MESSAGES_S
                loop.remove_reader(connection.pidfd)
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await news.wait()
            except TimeoutError:
                # It may have come while this process waited for a processor.
                if (message := _take(connection, source)) is not None:
                    return message
                if is_dead:
                    raise EngineStartError(f"{where}: {connection.describe_death()}") from None
                raise EngineStartError(
                    f"the engine did not answer in time ({where}); startup_timeout_s gives it "
                    f"longer"
                ) from None
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


def report_nothing(stage: str, fraction: float) -> None:
    pass
