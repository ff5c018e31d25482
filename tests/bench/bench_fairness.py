"""The first token of one key's requests while another key floods the server, and what they cost the
flood.

    python tests/bench/bench_fairness.py [--flood 800] [--max-tokens 64] [--requests 20] [--model
    bundled] [--engines 1]

Three phases on one server: B's requests alone, A's flood alone, and both. B sends one request after
the other. The goals: B's median first token at most three times that alone plus one step, A's
throughput at least 95 % of that alone. Throughput is per second of the engine's CPU time, too,
since B's requests themselves take some.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import time

import psutil
import uvloop
from quire.frontend.bench.http_client import HttpClient
from quire.frontend.bench.openai_client import Outcome, RequestOptions, stream_request
from quire.tests.bench.servers import free_port, wait_until_ready

OPTIONS = RequestOptions(endpoint="completions", ignore_eos=True, temperature=0.0)


async def send(client: HttpClient, prompt: str, max_tokens: int) -> Outcome:
    outcome = await stream_request(client, OPTIONS, prompt, max_tokens)
    assert outcome.failure is None, outcome.failure_text
    return outcome


async def flood(client: HttpClient, args: argparse.Namespace, round_: str) -> tuple[float, list]:
    """Returns (seconds, outcomes) of all requests at once."""
    start = time.perf_counter()
    prompts = [f"{round_} {i} is the number of this request" for i in range(args.flood)]
    outcomes = await asyncio.gather(*(send(client, p, args.max_tokens) for p in prompts))
    return time.perf_counter() - start, outcomes


async def first_tokens(
    client: HttpClient, num_requests: int, name: str, until: asyncio.Future | None = None
) -> list[float]:
    """Seconds to the first token of one request after the other, until the flood has ended."""
    found = []
    for i in range(num_requests):
        outcome = await send(client, f"{name} {i} asks a short question", 4)
        if until is not None and until.done():
            break
        found.append(outcome.token_times[0] - outcome.start)
        await asyncio.sleep(0.05)
    return found


async def measure(port: int, engines: list[psutil.Process], args: argparse.Namespace) -> None:
    def client(key: str) -> HttpClient:
        return HttpClient(f"http://127.0.0.1:{port}/v1", {"authorization": f"Bearer {key}"}, 600)

    def cpu_s() -> float:
        return sum(times.user + times.system for times in (one.cpu_times() for one in engines))

    a, b = client("a"), client("b")
    await first_tokens(b, 3, "warm")
    for round_ in range(args.rounds):
        alone = statistics.median(await first_tokens(b, args.requests, f"alone {round_}"))
        before = cpu_s()
        seconds, outcomes = await flood(a, args, f"alone {round_}")
        num_tokens, flood_cpu = sum(o.num_output_tokens for o in outcomes), cpu_s() - before
        steps = statistics.median(
            later - earlier
            for outcome in outcomes
            for earlier, later in zip(outcome.token_times, outcome.token_times[1:])
        )
        before = cpu_s()
        running = asyncio.ensure_future(flood(a, args, f"both {round_}"))
        await asyncio.sleep(0.3)
        under = await first_tokens(b, args.requests, f"both {round_}", running)
        both_seconds, _ = await running
        both_cpu = cpu_s() - before
        print(
            f"B alone {1e3 * alone:.1f} ms, between chunks of A {1e3 * steps:.1f} ms; under A's "
            f"flood median {1e3 * statistics.median(under):.1f} ms, most {1e3 * max(under):.1f} ms "
            f"({len(under)} requests). A alone {num_tokens / seconds:.0f} tokens/s, with B "
            f"{num_tokens / both_seconds:.0f} ({seconds / both_seconds:.1%}; by the engines' CPU "
            f"time {flood_cpu / both_cpu:.1%})"
        )
    a.close()
    b.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flood", type=int, default=800)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--engines", type=int, default=1)  # data_parallel_size
    args = parser.parse_args()
    port = free_port()
    flags = ["--port", str(port), "--api-key", "a", "--api-key", "b", "--no-access-log"]
    flags += ["--data-parallel-size", str(args.engines)]
    server = subprocess.Popen([sys.executable, "-m", "quire", "serve", args.model, *flags])
    try:
        wait_until_ready(port, server)
        engines = [
            child
            for child in psutil.Process(server.pid).children()
            if "quire.core.engine_proc" in child.cmdline()
        ]
        assert len(engines) == args.engines
        uvloop.run(measure(port, engines, args))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
