"""How long a user waits: import quire, quire --version, LLM() until ready, then the first token.

    python tests/bench/bench_startup.py [--rounds 5] [--write]
    python tests/bench/bench_startup.py --model FILE.gguf --peer "COMMAND" [--peer ...]

The second form compares `quire generate` with commands of others, each of which writes nothing to
stdout before its first token: from the command to that byte, in interleaved rounds. llama.cpp's is
"llama-completion -m FILE.gguf -p Hi -n 1 -no-cnv --no-display-prompt".

Every measurement uses a fresh interpreter, so the files are in the page cache and nothing else is
warm. The goals: 50 ms, 0.25 s, 6 s.
"""

from __future__ import annotations

import argparse
import json
import shlex
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


def seconds_to_first_byte(command: list[str]) -> float:
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - start
        process.stdout.read()
    if not first or process.returncode != 0:
        raise SystemExit(f"{shlex.join(command)} wrote nothing, or failed")
    return seconds


def compare(model: str, peers: list[str], rounds: int) -> None:
    own = [sys.executable, "-m", "quire", "generate", "Hi", "--model", model, "--max-tokens", "1"]
    commands = [own, *map(shlex.split, peers)]
    seconds: list[list[float]] = [[] for _ in commands]
    for _ in range(rounds):
        for command, found in zip(commands, seconds):
            found.append(seconds_to_first_byte(command))
    print(hardware())
    for command, found in zip(commands, seconds):
        low, middle, high = min(found), statistics.median(found), max(found)
        print(f"  {middle:6.2f} s ({low:.2f} to {high:.2f})  {shlex.join(command)}")


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
    parser.add_argument("--model", default="bundled", help="of the comparison")
    parser.add_argument("--peer", action="append", default=[], metavar="COMMAND")
    args = parser.parse_args()
    if args.peer:
        compare(args.model, args.peer, args.rounds)
        return
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
