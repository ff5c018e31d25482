"""The router of replicas beside other rules, in the simulation of tests/simulation/replicas.py, and
what it costs per request.

    python tests/bench/bench_router.py [--replicas 64] [--day-s 86400] [--rate 0.1] [--think-s 60]
    [--rules "round robin" "least load" router] [--step-ms 20] [--token-us 600] [--seed 0]

A day of conversations: few at its beginning and end, most in its middle. Cost is CPU time in the
rule: placing a request, its first token, its end. Prints a table in Markdown. A day of 64 replicas
and 3.3 million requests takes three to six minutes per rule; `--day-s 3600` has the same load in an
hour.
"""

from __future__ import annotations

import argparse
import time

from quire.tests.simulation.replicas import RULES, Machine, Traffic, simulate

BUSY = 11 / 24, 13 / 24  # of the day: the two hours around its middle


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, nargs="+", default=[64])
    parser.add_argument("--day-s", type=float, default=86_400.0)
    parser.add_argument("--rate", type=float, default=0.1)  # conversations/s per replica
    parser.add_argument("--think-s", type=float, default=60.0)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES))
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--token-us", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    machine = Machine(step_s=args.step_ms / 1e3, token_s=args.token_us / 1e6)
    print(
        "| replicas | rule | requests | first token p50, p99, s | p99 at noon, s | hit rate "
        "| cost, us | CPU, s |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    for number in args.replicas:
        traffic = Traffic(args.rate * number, args.day_s, think_s=args.think_s)
        for name in args.rules:
            began = time.thread_time()
            day = simulate(RULES[name], number, traffic, machine, args.seed)
            noon = day.quantile(0.99, *(part * args.day_s for part in BUSY))
            print(
                f"| {number} | {name} | {len(day.first_token_s)} | {day.quantile(0.5):.3f}, "
                f"{day.quantile(0.99):.3f} | {noon:.3f} | {day.hit_rate:.3f} | {day.rule_us:.1f} "
                f"| {time.thread_time() - began:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
