"""One server process of a group (group.py), run as `python -m quire.frontend.server.member`.

Must not know: routes, requests, the other processes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from ...ipc import platform_tuning
from ...ipc.errors import QuireError
from ...ipc.log_format import FORMATS, configure_logging, log_level_of
from ...ipc.process import die_with_parent, read_key
from ...ipc.systemd import Notifier
from ..engine_args import EngineArgs
from ..supervision.children import KEY
from .group import MemberSettings
from .serving import EngineServer, allowed_connections
from .state import ServerState
from .totals import SharedTotals

WAIT_INTERVAL_S = 0.02  # between two looks whether the engine is ready


def main() -> int:
    parser = argparse.ArgumentParser(prog="quire.frontend.server.member")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--key-fd", type=int, required=True)
    parser.add_argument("--log-level", type=int, default=logging.INFO)
    parser.add_argument("--log-format", choices=FORMATS, default="text")
    args = parser.parse_args()
    die_with_parent(args.parent_pid)
    read_key(args.key_fd, len(KEY))
    platform_tuning.begin_start()
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=MemberSettings)
    try:
        serve_member(settings)
    except QuireError as error:
        print(f"quire serve: {settings.name}: {error}", file=sys.stderr)
        return 1
    return 0


class MemberServer(EngineServer):
    """Drains on SIGTERM. A service manager may send it to every process, as the first one does too,
    so a second one changes nothing; the first process kills those that must end at once. waits:
    connections go to others until the engine is ready.
    """

    def __init__(self, *args: Any, waits: bool, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._waits = waits

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        while self._waits and self.state.engine is None and not self.should_exit:
            await asyncio.sleep(WAIT_INTERVAL_S)
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            super().handle_exit(sig, frame)


def serve_member(settings: MemberSettings) -> None:
    """Serves until SIGTERM. Raises QuireError if the engine cannot be used, or no longer."""
    config = settings.config
    configure_logging(log_level_of(config.log_level), config.log_format)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    config = msgspec.structs.replace(config, max_connections=allowed_connections(config))
    shared = SharedTotals(Path(settings.folder), settings.name)
    state = ServerState(config, settings.model_name, shared=shared)
    server = MemberServer(
        config,
        state,
        EngineArgs(**settings.arguments),
        settings.engine,
        on_ready=Notifier().ready,
        waits=settings.waits,
    )
    server.run(sockets=[socket.socket(fileno=settings.listener_fd)])
    state.publish_totals()
    if server.failure is not None:
        raise server.failure


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
