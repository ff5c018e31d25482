"""Throughput over HTTP relative to offline, and what a streamed token costs the server's process.

    python tests/bench/bench_serve.py [--rounds 7] [--streams 64] [--max-tokens 128]
    [--endpoint completions|chat] [--write]

On the bundled model. The goals: 90 %, 40 us. Both engines are started once; rounds alternate
between them, so that disturbances affect both alike. The server's CPU time is that of its own
process, without the engine's, for all its work on these requests: reading, tokenizing, streaming.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from typing import Any

import psutil
import uvloop
from quire.frontend.bench.http_client import HttpClient
from quire.frontend.bench.openai_client import RequestOptions, stream_request
from quire.frontend.bench.workloads import WORDS
from quire.tests.bench.report import hardware, write_result
from quire.tests.bench.servers import free_port, wait_until_ready

NUM_WORDS = 16


def make_prompts(round_: int, args: argparse.Namespace) -> list[Any]:
    """Texts or messages, depending on the endpoint, so that offline does the same work.

    Contents differ from round to round: the cache holds no prefixes of other rounds except the
    template's.
    """
    rng = random.Random(round_)
    texts = [" ".join(rng.choices(WORDS, k=NUM_WORDS)) for _ in range(args.streams)]
    return (
        [[{"role": "user", "content": text}] for text in texts]
        if args.endpoint == "chat"
        else texts
    )


def offline(args: argparse.Namespace) -> None:
    """A worker: for every line on stdin with a round's number, writes a line {"seconds", "tokens"}
    to stdout.
    """
    from quire import LLM, SamplingParams

    with LLM(args.model) as llm:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, ignore_eos=True)
            prompts = make_prompts(int(line), args)
            run = llm.chat if args.endpoint == "chat" else llm.generate
            start = time.perf_counter()
            outputs = run(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            print(json.dumps({"seconds": seconds, "tokens": num_tokens}), flush=True)


def measure_http(
    args: argparse.Namespace, round_: int, port: int, server: psutil.Process
) -> dict[str, float]:
    """One round over HTTP: all streams at once."""
    options = RequestOptions("bundled", args.endpoint, ignore_eos=True, temperature=0.0)
    prompts = make_prompts(round_, args)

    async def main() -> dict[str, float]:
        client = HttpClient(f"http://127.0.0.1:{port}/v1", {}, 600)
        before, own_before, start = server.cpu_times(), time.process_time(), time.perf_counter()
        outcomes = await asyncio.gather(
            *(stream_request(client, options, prompt, args.max_tokens) for prompt in prompts)
        )
        seconds, own = time.perf_counter() - start, time.process_time() - own_before
        after = server.cpu_times()
        client.close()
        assert {outcome.failure for outcome in outcomes} == {None}, {
            outcome.failure_text for outcome in outcomes
        }
        tokens = sum(outcome.num_output_tokens for outcome in outcomes)
        cpu = after.user + after.system - before.user - before.system
        chunks = sum(len(outcome.token_times) for outcome in outcomes)
        system_us = 1e6 * (after.system - before.system) / tokens
        return {
            "seconds": seconds,
            "tokens": tokens,
            "chunks": chunks,
            "cpu_us": 1e6 * cpu / tokens,
            "system_us": system_us,
            "client_cpu_share": own / seconds,
        }

    return uvloop.run(main())


def run_rounds(args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    port = free_port()
    flags = ["--model", args.model, "--streams", str(args.streams)]
    flags += ["--max-tokens", str(args.max_tokens), "--endpoint", args.endpoint]
    serve = [sys.executable, "-m", "quire", "serve", args.model]
    serve += ["--port", str(port), "--no-access-log"]
    worker = subprocess.Popen(
        [sys.executable, __file__, "--offline", *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    server = subprocess.Popen(serve, stderr=subprocess.DEVNULL)
    try:
        worker.stdout.readline()
        wait_until_ready(port, server)
        process = psutil.Process(server.pid)
        plain, http = [], []
        for round_ in range(args.rounds + 1):
            for _ in range(2):  # the order alternates
                if (len(plain) == len(http) == round_ and round_ % 2) or len(plain) > len(http):
                    http.append(measure_http(args, 2 * round_ + 1, port, process))
                else:
                    print(2 * round_, file=worker.stdin, flush=True)
                    plain.append(json.loads(worker.stdout.readline()))
        return plain[1:], http[1:]  # the first round warms up
    finally:
        server.terminate()
        worker.stdin.close()
        server.wait(30)
        worker.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    parser.add_argument("--write", action="store_true", help="append to tests/bench/results")
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        return offline(args)
    plain, http = run_rounds(args)
    rates = [[run["tokens"] / run["seconds"] for run in runs] for runs in (plain, http)]
    ratio = statistics.median(over_http / offline for offline, over_http in zip(*rates))
    numbers = {
        "rounds": args.rounds,
        "streams": args.streams,
        "max_tokens": args.max_tokens,
        "endpoint": args.endpoint,
        "offline_tokens_per_s": statistics.median(rates[0]),
        "http_tokens_per_s": statistics.median(rates[1]),
        "http_of_offline": ratio,
        "server_cpu_us_per_token": statistics.median(run["cpu_us"] for run in http),
        "server_cpu_us_per_token_by_round": [run["cpu_us"] for run in http],
        "tokens_per_chunk": statistics.median(run["tokens"] / run["chunks"] for run in http),
        "client_cpu_share": statistics.median(run["client_cpu_share"] for run in http),
    }
    print(
        f"{hardware()}, {args.streams} streams of {args.max_tokens} tokens, {args.endpoint}, "
        f"medians of {args.rounds} rounds"
    )
    print(
        f"offline {numbers['offline_tokens_per_s']:.0f} tokens/s, over HTTP "
        f"{numbers['http_tokens_per_s']:.0f}: {100 * ratio:.1f} % (goal 90)"
    )
    print(
        f"the server's process: {numbers['server_cpu_us_per_token']:.1f} us of CPU per token (goal "
        f"40), {numbers['tokens_per_chunk']:.2f} tokens per chunk"
    )
    print(f"the client: {100 * numbers['client_cpu_share']:.0f} % of a core")
    if args.write:
        print(write_result(args.model, f"serve-{args.endpoint}-{args.streams}", numbers))


if __name__ == "__main__":
    main()
