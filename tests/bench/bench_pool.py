"""What the threads of native kernels cost: a call without work, a run, a run after idling.

    python tests/bench/bench_pool.py [--threads 2] [--write]

Alone and next to a busy process. "call" is one of 200 in a run: the barrier. "run" is a run of one
call immediately after the last. "idle" is a run after a millisecond of sleep, in which the threads
sleep too. "hint" is the same with wake() 0.05 ms before it. Rounds alternate.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from quire.kernels.cpu.native.calls import BF16, Op, SiluAndMul, Step
from quire.kernels.cpu.native.library import library
from quire.tests.bench.report import hardware, write_result

EMPTY = SiluAndMul(
    op=Op.SILU_AND_MUL, dtype=BF16, rows=0, x=None, out=None, x_row=0, out_row=0, size=1
)
STEP, CALLS = Step(), 200


def timed(num_calls: int, before: Callable[[], None]) -> float:
    """Microseconds per call of one run."""
    pointers = (ctypes.c_void_p * num_calls)(*[ctypes.addressof(EMPTY)] * num_calls)
    before()
    start = time.perf_counter()
    library.run_all(pointers, STEP)
    return (time.perf_counter() - start) / num_calls * 1e6


def nothing() -> None:
    pass


def idle() -> None:
    time.sleep(1e-3)


def hint() -> None:
    time.sleep(1e-3)
    library.wake()
    until = time.perf_counter() + 5e-5
    while time.perf_counter() < until:  # busy, like a caller that prepares a step
        pass


KINDS = {"call": (CALLS, nothing), "run": (1, nothing), "idle": (1, idle), "hint": (1, hint)}


def measure(num_threads: int, cores: list[int] | None, rounds: int) -> dict[str, list[float]]:
    """Kind -> minimum, median and 90th percentile."""
    library.set_num_threads(num_threads, cores)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, (num_calls, before) in KINDS.items():
            found[kind].append(timed(num_calls, before))
    return {
        kind: [min(times), statistics.median(times), statistics.quantiles(times, n=10)[-1]]
        for kind, times in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--write", action="store_true", help="append the result to tests/bench/results/"
    )
    args = parser.parse_args()
    free = [-1] * args.threads
    result = {}
    for beside in ("nothing", "a busy process"):
        busy = (
            [subprocess.Popen([sys.executable, "-c", "while True: pass"])]
            if beside != "nothing"
            else []
        )
        try:
            time.sleep(0.2)
            for name, num_threads, cores in (
                ("one thread", 1, None),
                ("pinned", args.threads, None),
                ("free", args.threads, free),
            ):
                result[f"{name}, beside {beside}"] = found = measure(
                    num_threads, cores, args.rounds
                )
                print(
                    f"{name + ', beside ' + beside:34}"
                    + "".join(
                        f"  {k} {' / '.join(f'{us:.2f}' for us in v)}" for k, v in found.items()
                    ),
                    flush=True,
                )
        finally:
            for process in busy:
                process.kill()
                process.wait()
    print("us: least / median / 90th percentile;", hardware())
    if args.write:
        print(write_result("no-model", f"pool-{args.threads}", result))


if __name__ == "__main__":
    main()
