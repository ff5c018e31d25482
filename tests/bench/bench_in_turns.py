"""The same work by two engines that differ in their version or their settings, asked in turns.

    python tests/bench/bench_in_turns.py [--before DIRECTORY] [--settings JSON JSON] [--rounds 40]
    [--work NAME …]

--before: a directory with another version's package `quire`, which is the first engine. --settings:
arguments of LLM for the first and the second engine; by default one without and one with
supervision. A round asks both engines for each kind of work, in changing order; the result is the
median of the rounds' ratios, so that what disturbs the machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEFAULTS = ('{"on_engine_death": "fail"}', '{"on_engine_death": "restart"}')
# name -> (requests, tokens of each)
WORK = {"one request": (1, 256), "16 requests": (16, 64), "first token": (1, 1)}
MORE_WORK = {
    "8 requests": (8, 32),
    "32 requests": (32, 16),
    "a prompt of 1024": (1, 1),
}  # by --work
PROMPTS = {"a prompt of 1024": 1024}
REPEATS = {"first token": 40}


def serve(settings: dict) -> None:
    """Answers each line, the name of a kind of work, with the seconds that it took."""
    from quire import LLM, SamplingParams

    with LLM(num_threads=1, enable_prefix_caching=False, **settings) as llm:
        for line in sys.stdin:
            work = line.strip()
            num_requests, num_tokens = (WORK | MORE_WORK)[work]
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            length = PROMPTS.get(work, 16)
            prompts = [{"prompt_token_ids": [5 + i] * length} for i in range(num_requests)]
            began = time.perf_counter()
            for _ in range(REPEATS.get(work, 1)):
                llm.generate(prompts, params, use_tqdm=False)
            print(time.perf_counter() - began, flush=True)


def start(directory: Path, settings: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", __file__, "--serve", settings],
        env=os.environ | {"PYTHONPATH": str(directory)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(engine: subprocess.Popen[str], work: str) -> float:
    assert engine.stdin is not None and engine.stdout is not None
    print(work, file=engine.stdin, flush=True)
    return float(engine.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, default=ROOT.parent)
    parser.add_argument("--settings", nargs=2, default=None)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--work", nargs="*", choices=[*WORK, *MORE_WORK], default=list(WORK))
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(json.loads(args.serve))
    settings = args.settings or (DEFAULTS if args.before == ROOT.parent else ("{}", "{}"))
    engines = [start(args.before, settings[0]), start(ROOT.parent, settings[1])]
    seconds: dict[str, list[tuple[float, float]]] = {work: [] for work in args.work}
    for number in range(-2, args.rounds):
        for work in args.work:
            first = number % 2
            one, other = (ask(engines[i], work) for i in (first, 1 - first))
            if number >= 0:  # the first rounds warm up
                seconds[work].append((other, one) if first else (one, other))
    for work, pairs in seconds.items():
        ratios = sorted(a / b for a, b in pairs)
        quarter = len(ratios) // 4
        print(
            f"{work}: {statistics.median(a for a, _ in pairs):.4f} s and "
            f"{statistics.median(b for _, b in pairs):.4f} s; speed of the second "
            f"{100 * statistics.median(ratios):.1f} % of the first (middle half "
            f"{100 * ratios[quarter]:.1f} to {100 * ratios[-1 - quarter]:.1f} %)"
        )
    for engine in engines:
        engine.stdin.close()
        engine.wait()


if __name__ == "__main__":
    main()
