"""An engine's process that starts before its configuration is known: it imports its libraries while
this process imports its own and reads the model's headers.

Must not know: what an engine imports, or how its configuration is made.

    this process    early_engine ─▶ imports ─▶ configuration ─▶ open_connection takes the process
    the engine        HELLO ─▶ torch and the executor ────────────────▶ CONFIG ─▶ weights
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import platform_tuning
from .config import ServiceConfig
from .connection import Connection
from .early_process import end_early_process, take_early_process
from .process import engine_command

_waiting: Connection | None = None


@contextmanager
def early_engine(engine: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Starts the process, unless it runs already (ipc/early_process.py). The first
    `open_connection` inside takes it. If none does, it is ended with the context.

    engine: see `open_connection`. arguments: the engine's, by name, those that were given. Does
    nothing if they ask for another kind of engine or process, which must not import early.
    """
    global _waiting
    is_on_cpu = arguments.get("device", "auto") in ("auto", "cpu")
    is_own = engine == "process" and platform_tuning.is_enabled()
    if not is_own or not is_on_cpu or arguments.get("logits_processors"):
        end_early_process()
        yield
        return
    max_message_bytes = arguments.get("max_message_bytes", ServiceConfig().max_message_bytes)
    _waiting = Connection(max_message_bytes)
    try:
        command = engine_command(imports_for="cpu")
        _waiting.spawn(command, max_message_bytes, take_early_process())
        yield
    finally:
        if (connection := take_early_engine()) is not None:
            connection.close()  # it has nothing to save


def take_early_engine() -> Connection | None:
    """Returns the connection to the waiting process, once; the caller owns it."""
    global _waiting
    taken, _waiting = _waiting, None
    return taken
