"""The router of replicas beside other rules, in the simulation of tests/simulation/replicas.py, and
what it costs per request.

    python tests/bench/bench_router.py [--replicas 64 256 1000] [--requests 200000] [--rate 0.45]
    [--step-ms 20] [--token-us 600] [--seed 0]

A day of conversations whose length in seconds follows from the number of requests. Cost is CPU time
in the rule: placing a request, its first token, its end. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse

from quire.tests.simulation.replicas import RULES, Machine, Traffic, simulate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--rate", type=float, default=0.45)  # conversations/s per replica
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--token-us", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    machine = Machine(step_s=args.step_ms / 1e3, token_s=args.token_us / 1e6)
    print("| replicas | rule | requests | first token p50, p99, s | hit rate | cost, us |")
    print("|---|---|---|---|---|---|", flush=True)
    for number in args.replicas:
        rate = args.rate * number
        traffic = Traffic(rate, args.requests / (Traffic.mean_turns * rate))
        for name, kind in RULES.items():
            day = simulate(kind, number, traffic, machine, args.seed)
            print(
                f"| {number} | {name} | {len(day.first_token_s)} | {day.quantile(0.5):.3f}, "
                f"{day.quantile(0.99):.3f} | {day.hit_rate:.3f} | {day.rule_us:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
