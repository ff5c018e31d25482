"""The processes of a server that tests do harm to."""

from __future__ import annotations

import contextlib

import httpx2 as httpx
import psutil


def engine_of(server: httpx.Client) -> psutil.Process | None:
    """The server's engine, ready or starting, if there is one."""
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(psutil.Error):
            if any("engine_proc" in word for word in child.cmdline()):
                return child
    return None


def grammar_processes(server: httpx.Client) -> list[psutil.Process]:
    """Those in which the engine checks grammars."""
    engine = engine_of(server)
    with contextlib.suppress(psutil.Error):
        return [] if engine is None else engine.children()
    return []
