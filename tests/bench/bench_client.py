"""What `quire bench serve` itself costs per streamed chunk, next to other HTTP clients.

    python tests/bench/bench_client.py [--rounds 5] [--clients quire httpx2 aiohttp] [--write]

The server does almost nothing. 64 streams; every 10 ms each gets one chunk, in its own segment, as
from a server whose steps take 10 ms. The CPU time of the reading process is counted. The other
clients only split the stream into lines and decode them, the minimum for a load generator.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
from importlib.util import find_spec
from time import process_time
from typing import Any

import msgspec
import uvloop

STREAMS, CHUNKS, INTERVAL_S = 64, 200, 0.01
CHUNK = {
    "id": "cmpl-" + "0" * 32,
    "object": "text_completion",
    "created": 1700000000,
    "model": "bundled",
}
CLIENTS = ("quire", "httpx2", "aiohttp")


def event(**fields: Any) -> bytes:
    data = b"data: " + json.dumps({**CHUNK, **fields}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN = event(choices=[{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}])
LAST = event(choices=[{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}])
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Stream(asyncio.Protocol):
    """Answers every request with CHUNKS chunks, one per tick."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport, self.left = transport, 0

    def data_received(self, data: bytes) -> None:
        if data.endswith(b"}"):  # the end of a body; a request arrives in one segment or two
            self.left = CHUNKS
            self.transport.write(HEAD)
            self.tick()

    def tick(self) -> None:
        if self.transport.is_closing():
            return
        if self.left:
            self.left -= 1
            self.transport.write(TOKEN)
            asyncio.get_running_loop().call_later(INTERVAL_S, self.tick)
        else:
            self.transport.write(LAST + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Stream, "127.0.0.1", 0, backlog=STREAMS)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def quire(url: str) -> int:
    from quire.frontend.bench.http_client import HttpClient
    from quire.frontend.bench.openai_client import RequestOptions, stream_request

    client = HttpClient(url + "/v1", {}, 60)
    outcomes = await asyncio.gather(
        *(stream_request(client, RequestOptions("nothing"), "x", CHUNKS) for _ in range(STREAMS))
    )
    assert {outcome.failure for outcome in outcomes} == {None}
    return sum(len(outcome.token_times) for outcome in outcomes)


async def httpx2(url: str) -> int:
    import httpx2

    async def one() -> int:
        count = 0
        async with client.stream("POST", "/v1/completions", json={"stream": True}) as response:
            async for line in response.aiter_lines():
                count += decode(line.encode())
        return count

    async with httpx2.AsyncClient(
        base_url=url, timeout=60, limits=httpx2.Limits(max_connections=None)
    ) as client:
        return sum(await asyncio.gather(*(one() for _ in range(STREAMS))))


async def aiohttp(url: str) -> int:
    import aiohttp

    async def one() -> int:
        count = 0
        async with client.post(url + "/v1/completions", json={"stream": True}) as response:
            async for line in response.content:
                count += decode(line)
        return count

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        return sum(await asyncio.gather(*(one() for _ in range(STREAMS))))


def decode(line: bytes) -> int:
    if not line.startswith(b"data: ") or b"[DONE]" in line:
        return 0
    return int(not msgspec.json.decode(line[6:])["choices"][0]["finish_reason"])


def measure(name: str, url: str) -> None:
    """One round in this process; its CPU microseconds per chunk on standard output."""

    async def main() -> float:
        await CLIENT_FUNCTIONS[name](url)  # imports, connections, compiled patterns
        start = process_time()
        assert await CLIENT_FUNCTIONS[name](url) == STREAMS * CHUNKS
        return 1e6 * (process_time() - start) / (STREAMS * CHUNKS)

    print(uvloop.run(main()))


CLIENT_FUNCTIONS = {"quire": quire, "httpx2": httpx2, "aiohttp": aiohttp}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--clients",
        nargs="+",
        choices=CLIENTS,
        default=[name for name in CLIENTS if find_spec(name)],
    )
    parser.add_argument("--write", action="store_true", help="append to tests/bench/results")
    # role of a child process: serve, or a client and a URL
    parser.add_argument("--as", dest="role", metavar="ROLE", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        uvloop.run(serve()) if args.role == "serve" else measure(args.role, args.url)
        return
    server = subprocess.Popen(
        [sys.executable, __file__, "--as", "serve"], stdout=subprocess.PIPE, text=True
    )
    try:
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        found: dict[str, list[float]] = {name: [] for name in args.clients}
        for _ in range(args.rounds):
            for name in args.clients:
                done = subprocess.run(
                    [sys.executable, __file__, "--as", name, "--url", url],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                )
                found[name].append(float(done.stdout))
    finally:
        server.kill()
    for name, values in found.items():
        print(
            f"{name:<10} {statistics.median(values):6.1f} us of CPU per chunk "
            f"({', '.join(f'{value:.1f}' for value in values)})"
        )
    if args.write:
        from quire.tests.bench.report import write_result

        print(
            write_result(
                "none",
                "bench-client",
                {"streams": STREAMS, "chunks": CHUNKS, "cpu_us_per_chunk": found},
            )
        )


if __name__ == "__main__":
    main()
