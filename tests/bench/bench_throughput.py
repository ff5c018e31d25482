"""Throughput with the engine in a child process relative to the same process. The goal: 95 %.

    python tests/bench/bench_throughput.py [--rounds 7] [--requests 32] [--max-tokens 128] [--write]

On the bundled model. Each form runs in its own program, started once; rounds alternate between
them, so that disturbances affect both alike.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time

from quire import LLM, SamplingParams
from quire.tests.bench.report import hardware, write_result

FORMS = ("inproc", "process")
VOCAB = range(300, 1000)  # ids that every tokenizer here has, none of them special


def serve(form: str, model: str) -> None:
    """A worker: for every line {"round", "requests", "max_tokens"} on stdin, writes a line
    {"seconds", "tokens"} to stdout.
    """
    with LLM(model, engine=form) as llm:
        print(json.dumps({"ready": form}), flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            prompts = make_prompts(job["round"], job["requests"])
            params = SamplingParams(temperature=0.0, max_tokens=job["max_tokens"], ignore_eos=True)
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - start
            print(
                json.dumps(
                    {
                        "seconds": seconds,
                        "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
                    }
                ),
                flush=True,
            )


def make_prompts(round_: int, num_requests: int) -> list[list[int]]:
    """Lengths are the same in every round, contents differ: the cache holds no prefixes of other
    rounds.
    """
    lengths, contents = random.Random(1), random.Random(f"round {round_}")
    return [
        [contents.choice(VOCAB) for _ in range(lengths.randint(32, 256))]
        for _ in range(num_requests)
    ]


class Worker:
    def __init__(self, form: str, model: str):
        command = [sys.executable, __file__, "--worker", form, "--model", model]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def tokens_per_second(self, job: dict) -> float:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        return answer["tokens"] / answer["seconds"]

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the worker ended with code {self.process.wait()}; its words are above")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--write", action="store_true", help="append the result to tests/bench/results/"
    )
    parser.add_argument("--worker", choices=FORMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return serve(args.worker, args.model)
    workers = {form: Worker(form, args.model) for form in FORMS}
    speeds: dict[str, list[float]] = {form: [] for form in FORMS}
    for round_ in range(args.rounds + 1):
        job = {"round": round_, "requests": args.requests, "max_tokens": args.max_tokens}
        order = FORMS if round_ % 2 else FORMS[::-1]
        measured = {form: workers[form].tokens_per_second(job) for form in order}
        print(
            f"round {round_}{' (warm-up)' if round_ == 0 else ''}: "
            + ", ".join(f"{form} {measured[form]:.0f}" for form in FORMS)
            + " tokens/s",
            flush=True,
        )
        for form in FORMS if round_ else ():
            speeds[form].append(measured[form])
    for worker in workers.values():
        worker.close()
    medians = {form: statistics.median(speeds[form]) for form in FORMS}
    ratio = statistics.median(
        process / inproc
        for process, inproc in zip(speeds["process"], speeds["inproc"], strict=True)
    )
    print(
        f"{hardware()}: process {medians['process']:.0f}, inproc {medians['inproc']:.0f} tokens/s; "
        f"ratio {ratio:.1%} (median of rounds)"
    )
    if args.write:
        numbers = {
            "requests": args.requests,
            "max_tokens": args.max_tokens,
            "tokens_per_second": medians,
            "ratio": ratio,
            "rounds": speeds,
        }
        print(write_result(args.model, f"throughput-{args.requests}", numbers))


if __name__ == "__main__":
    main()
