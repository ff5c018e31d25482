"""One server process beside several over one engine (`--api-server-count`), asked in turns.

    python tests/bench/bench_api_servers.py [--servers 2] [--rounds 7] [--streams 64]
    [--max-tokens 128] [--endpoint completions|chat]

On the bundled model. It needs cores for the engine, each server process and the client: the
client's share of a core is printed, and where it is near 100 % the client is what was measured.
Rounds alternate between both, so that disturbances affect both alike. Printed are medians over
rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from contextlib import ExitStack

import psutil
from quire.tests.bench.bench_serve import measure_http
from quire.tests.bench.report import hardware
from quire.tests.bench.servers import free_port, wait_until_ready


def start(stack: ExitStack, num_servers: int) -> tuple[int, psutil.Process]:
    """Starts a server of so many processes, and returns its port and its first process."""
    port = free_port()
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port)]
    command += ["--no-access-log", "--api-server-count", str(num_servers)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    stack.callback(server.wait, 60)
    stack.callback(server.terminate)
    wait_until_ready(port, server)
    return port, psutil.Process(server.pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    args = parser.parse_args()
    counts, runs = (1, args.servers), ([], [])
    with ExitStack() as stack:
        sides = [start(stack, count) for count in counts]
        for round_ in range(args.rounds + 1):  # the first one warms up
            for side in (0, 1) if round_ % 2 else (1, 0):
                runs[side].append(measure_http(args, 2 * round_ + side, *sides[side]))
    rates = [[run["tokens"] / run["seconds"] for run in side[1:]] for side in runs]
    print(f"{hardware()}, {args.streams} streams of {args.max_tokens} tokens, {args.endpoint}")
    for count, rate, side in zip(counts, rates, runs):
        share = statistics.median(run["client_cpu_share"] for run in side[1:])
        print(
            f"server processes: {count}, tokens/s: {statistics.median(rate):.0f}, the client: "
            f"{100 * share:.0f} % of a core"
        )
    ratios = [several / one for one, several in zip(*rates)]
    least, most = min(ratios), max(ratios)
    print(f"ratio of rounds: {statistics.median(ratios):.2f} ({least:.2f} to {most:.2f})")


if __name__ == "__main__":
    main()
