"""How long a user waits: import quire, quire --version, LLM() until ready, then the first token.

    python tests/bench/bench_startup.py [--rounds 5] [--write]

Every measurement uses a fresh interpreter, so the files are in the page cache and nothing else is
warm. The goals: 50 ms, 0.25 s, 6 s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from quire.tests.bench.report import hardware, write_result

READY = """
import json, time
start = time.perf_counter()
from quire import LLM, SamplingParams
llm = LLM(engine={form!r})
ready = time.perf_counter() - start
llm.generate("Once upon a time", SamplingParams(max_tokens=1), use_tqdm=False)
first_token = time.perf_counter() - start - ready
llm.close()
print(json.dumps({{"ready": ready, "first_token": first_token}}))
"""


def seconds_of(*command: str) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def measure() -> dict[str, float]:
    numbers = {
        "interpreter": seconds_of(sys.executable, "-c", "pass"),
        "import_quire": seconds_of(sys.executable, "-c", "import quire"),
        "version": seconds_of(sys.executable, "-m", "quire", "--version"),
    }
    for form in ("process", "inproc"):
        done = subprocess.run(
            [sys.executable, "-c", READY.format(form=form)],
            check=True,
            capture_output=True,
            text=True,
        )
        result = json.loads(done.stdout.splitlines()[-1])
        numbers |= {f"ready_{form}": result["ready"], f"first_token_{form}": result["first_token"]}
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--write", action="store_true", help="append the result to tests/bench/results/"
    )
    args = parser.parse_args()
    rounds = [measure() for _ in range(args.rounds)]
    medians = {name: statistics.median(numbers[name] for numbers in rounds) for name in rounds[0]}
    medians["import_quire"] -= medians["interpreter"]
    print(hardware())
    for name, seconds in medians.items():
        print(f"  {name:<20} {seconds:7.3f} s")
    if args.write:
        print(write_result("bundled", "startup", {"seconds": medians, "rounds": rounds}))


if __name__ == "__main__":
    main()
