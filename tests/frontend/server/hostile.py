"""A hostile client as a program, and single bad requests as a function for the test's own process.

`python -m quire.tests.frontend.server.hostile PORT COUNT` opens COUNT connections of each slow
kind, and reopens those that are closed, until it reads a line on standard input. Then it prints the
results as JSON.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections import Counter

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
# What a slow client sends first, and what it then sends byte by byte; None: nothing more.
SLOW = {
    "silent": (b"", None),
    "headers": (HEAD, b"X-Header: value\r\n"),
    "half a head": (HEAD + b"X-Header: ", None),
    "body": (HEAD + b"Content-Length: 100000\r\n\r\n", b"{"),
    "chunked body": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n"),
}
DRIP_S = 0.5


async def run_slow_client(
    port: int, kind: str, ends: Counter[str], longest: Counter[str], is_over: asyncio.Event
) -> None:
    """Open one connection after the other."""
    begin, drip = SLOW[kind]
    while not is_over.is_set():
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            ends[f"{kind}: {type(error).__name__}"] += 1
            await asyncio.sleep(DRIP_S)
            continue
        began, answer, position = time.monotonic(), b"", 0
        writer.write(begin)
        try:
            while not is_over.is_set():
                if drip is not None:
                    writer.write(drip[position : position + 1])
                    position = (position + 1) % len(drip)
                try:
                    answer = await asyncio.wait_for(reader.read(4096), DRIP_S)
                except TimeoutError:
                    continue
                longest[kind] = max(longest[kind], round(1000 * (time.monotonic() - began)))
                ends[f"{kind}: {answer[9:12].decode() or 'closed'}"] += 1
                break
        except OSError:
            ends[f"{kind}: closed"] += 1
        writer.transport.abort()


async def main(port: int, count: int) -> None:
    ends: Counter[str] = Counter()
    longest: Counter[str] = Counter()  # milliseconds that a connection was open before its answer
    is_over = asyncio.Event()
    tasks = [
        asyncio.create_task(run_slow_client(port, kind, ends, longest, is_over))
        for kind in SLOW
        for _ in range(count)
    ]
    await asyncio.to_thread(sys.stdin.readline)
    is_over.set()
    await asyncio.gather(*tasks)
    print(json.dumps({"ends": ends, "longest_ms": longest}))


def exchange(
    port: int, *pieces: bytes, repeat: int = 1, timeout_s: float = 60.0
) -> tuple[int | None, bytes]:
    """Return (status, answer) of a request sent piece by piece, the last one `repeat` times; None
    if the server closed without an answer.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        try:
            for piece in pieces[:-1]:
                connection.sendall(piece)
            for _ in range(repeat):
                connection.sendall(pieces[-1])
        except OSError:
            pass  # the server stopped reading; its answer can still be read
        answer = b""
        try:
            while not (b"\r\n\r\n" in answer and answer.endswith(b"}")) and (
                data := connection.recv(65536)
            ):
                answer += data
        except ConnectionError:
            pass
    return int(answer[9:12]) if answer else None, answer


if __name__ == "__main__":
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    import uvloop

    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
