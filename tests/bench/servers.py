"""Server processes that benchmarks ask over HTTP: a free port, when one is ready, its requests.

The client is that of `quire bench serve`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from typing import Any

from quire.frontend.bench.http_client import Failure, HttpClient

START_TIMEOUT_S, REQUEST_TIMEOUT_S = 300, 900


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_until_ready(port: int, server: subprocess.Popen, path: str = "/health/ready") -> None:
    """Ends the program if the server ends, or is not ready in time."""

    async def is_ready() -> bool:
        client = HttpClient(f"http://127.0.0.1:{port}", {}, 10)
        try:
            return (await client.exchange("GET", path)).status == 200
        except Failure:  # not yet listening
            return False
        finally:
            client.close()

    deadline = time.perf_counter() + START_TIMEOUT_S
    while server.poll() is None and time.perf_counter() < deadline:
        if asyncio.run(is_ready()):
            return
        time.sleep(0.01)
    sys.exit("the server did not start")


def post_together(port: int, path: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to requests that are sent at the same time. Ends the program for a refusal."""

    async def main() -> list[Any]:
        client = HttpClient(f"http://127.0.0.1:{port}", {}, REQUEST_TIMEOUT_S)
        sent = [client.exchange("POST", path, json.dumps(body).encode()) for body in bodies]
        try:
            return await asyncio.gather(*sent)
        finally:
            client.close()

    answers = asyncio.run(main())
    for answer in answers:
        if answer.status != 200:
            sys.exit(f"{path} was answered {answer.status}: {bytes(answer.body[:300])!r}")
    return [json.loads(answer.body) for answer in answers]
