"""What it costs and gives to send the tokens of several steps in one chunk (`--max-chunks-per-s`).

    python tests/bench/bench_pacing.py [--model bundled] [--chunks-per-s 0 1250] [--streams 1 8 64]
        [--tokens 128] [--rounds 10]

One server for each pace; the servers take turns. In a round each of the streams asks for --tokens
tokens once. The figures are medians over the rounds: output tokens per second of all streams; CPU
time of the server's process and of its engine per token, in microseconds, of which the server's is
what chunks cost; tokens per chunk; the first token; and the gap between two chunks of a stream,
its median and its 99th percentile. The last column is the speed relative to the first pace, as the
median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from quire.frontend.bench.http_client import HttpClient
from quire.frontend.bench.openai_client import RequestOptions, stream_request
from quire.tests.bench.servers import free_port, wait_until_ready

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
COLUMNS = ("tokens/s", "server us", "engine us", "tokens/chunk", "first ms", "gap ms", "p99 ms")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


async def run_streams(port: int, num_streams: int, num_tokens: int, name: str) -> dict[str, float]:
    """Returns what the columns need, but for CPU time."""
    options = RequestOptions(endpoint="completions", ignore_eos=True, temperature=0.0)
    client = HttpClient(f"http://127.0.0.1:{port}/v1", {}, 600)
    began = time.perf_counter()
    try:
        outcomes = await asyncio.gather(
            *(
                stream_request(client, options, f"{name} {i}: once upon a time", num_tokens)
                for i in range(num_streams)
            )
        )
    finally:
        client.close()
    seconds = time.perf_counter() - began
    assert not any(outcome.failure for outcome in outcomes), outcomes
    gaps = sorted(gap for outcome in outcomes for gap in outcome.itls)
    total = num_streams * num_tokens
    return {
        "tokens/s": total / seconds,
        "tokens/chunk": total / sum(len(outcome.token_times) for outcome in outcomes),
        "first ms": 1e3 * statistics.median(one.token_times[0] - one.start for one in outcomes),
        "gap ms": 1e3 * statistics.median(gaps),
        "p99 ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
    }


def measure(server: subprocess.Popen, port: int, *work: object) -> dict[str, float]:
    num_streams, num_tokens, name = work
    engine = descendants(server.pid)
    before = cpu_s(server.pid), sum(map(cpu_s, engine))
    found = asyncio.run(run_streams(port, num_streams, num_tokens, name))
    after = cpu_s(server.pid), sum(map(cpu_s, engine))
    total = num_streams * num_tokens
    for column, begin, end in zip(("server us", "engine us"), before, after, strict=True):
        found[column] = 1e6 * (end - begin) / total
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--chunks-per-s", nargs="+", type=int, default=[0, 1250])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    with ExitStack() as ending:
        servers = {}
        for pace in args.chunks_per_s:
            port = free_port()
            flags = ["--port", str(port), "--no-access-log", "--max-chunks-per-s", str(pace)]
            server = subprocess.Popen([sys.executable, "-m", "quire", "serve", args.model, *flags])
            ending.callback(server.wait)
            ending.callback(server.terminate)
            wait_until_ready(port, server)
            servers[pace] = server, port
        print(f"| streams | chunks/s | {' | '.join(COLUMNS)} | speed |")
        print("|---" * (len(COLUMNS) + 3) + "|")
        for num_streams in args.streams:
            found: dict[int, list[dict[str, float]]] = {pace: [] for pace in servers}
            for number in range(-1, args.rounds):  # the first warms up
                for pace in list(servers)[:: 1 if number % 2 else -1]:
                    name = f"{num_streams} {number}"
                    figures = measure(*servers[pace], num_streams, args.tokens, name)
                    if number >= 0:
                        found[pace].append(figures)
            first = found[args.chunks_per_s[0]]
            for pace, rounds in found.items():
                cells = [statistics.median(one[column] for one in rounds) for column in COLUMNS]
                ratio = statistics.median(
                    one["tokens/s"] / other["tokens/s"]
                    for one, other in zip(rounds, first, strict=True)
                )
                texts = " | ".join(f"{cell:.{0 if cell >= 100 else 1}f}" for cell in cells)
                print(f"| {num_streams} | {pace} | {texts} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
