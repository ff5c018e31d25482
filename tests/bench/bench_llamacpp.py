"""Quire and llama.cpp on one GGUF file, in turns.

    python tests/bench/bench_llamacpp.py MODEL.gguf --llama-bin DIRECTORY [--rounds 3]
    [--threads 2] [--work NAME …]

llama.cpp is its llama-batched-bench, which calls the library without a server. Quire is LLM with
the engine in a child process. Both get random prompts of the same lengths. The machine's other work
disturbs both alike if their turns are short; under `chrt -f 10` it disturbs neither. Prints the
median of each and of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Work(NamedTuple):
    requests: int
    prompt: int  # tokens of each request
    output: int

    @property
    def counted(self) -> int:
        """The tokens that a rate counts: those of the prompt where almost nothing is written."""
        return self.requests * (self.prompt if self.output == 1 else self.output)


WORK = {
    "one request": Work(1, 128, 128),
    "16 requests": Work(16, 128, 64),
    "a prompt of 2048": Work(1, 2048, 1),
}
LAST_TOKEN = 8000  # of random prompts; each vocabulary has so many


def serve(model: str, threads: int) -> None:
    """Answers each line, the name of a kind of work, with the seconds that it took."""
    from quire import LLM, SamplingParams

    with LLM(model, num_threads=threads, max_model_len=4096, skip_tokenizer_init=True) as llm:
        for line in sys.stdin:
            work = WORK[line.strip()]
            params = SamplingParams(max_tokens=work.output, temperature=0.0, ignore_eos=True)
            prompts = [
                {"prompt_token_ids": random.choices(range(100, LAST_TOKEN), k=work.prompt)}
                for _ in range(work.requests)
            ]
            began = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            print(time.perf_counter() - began, flush=True)


def start(model: str, threads: int) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, model, "--threads", str(threads), "--serve"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(engine: subprocess.Popen[str], name: str) -> float:
    assert engine.stdin is not None and engine.stdout is not None
    print(name, file=engine.stdin, flush=True)
    return float(engine.stdout.readline())


def llama_seconds(folder: Path, model: str, threads: int, work: Work) -> float:
    """Seconds without those of loading the model."""
    tokens = work.requests * (work.prompt + work.output)
    sizes = {"-npp": work.prompt, "-ntg": work.output, "-npl": work.requests, "-c": tokens}
    command = [str(folder / "llama-batched-bench"), "-m", model, "-t", str(threads)]
    command += ["-tb", str(threads), "-b", "2048", "-ub", "512", "--output-format", "jsonl"]
    command += [str(part) for pair in sizes.items() for part in pair]
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    [line] = [line for line in found.stdout.splitlines() if line.startswith("{")]
    result = json.loads(line)
    # the first token follows the prompt
    return result["t_pp"] if work.output == 1 else result["t"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--llama-bin", type=Path, default=Path())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", nargs="*", choices=list(WORK), default=list(WORK))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.model, args.threads)
    engine = start(args.model, args.threads)
    for name in args.work:
        work, pairs = WORK[name], []
        ask(engine, name)  # warms up
        for _ in range(args.rounds):
            mine = ask(engine, name)
            pairs.append((mine, llama_seconds(args.llama_bin, args.model, args.threads, work)))
        mine, other = (work.counted / statistics.median(of) for of in zip(*pairs))
        ratio = statistics.median(b / a for a, b in pairs)
        print(
            f"{Path(args.model).name}, {name}: {mine:.1f} and {other:.1f} tokens/s, {ratio:.2f} "
            f"times; seconds {' '.join(f'{a:.2f}:{b:.2f}' for a, b in pairs)}",
            flush=True,
        )
    assert engine.stdin is not None
    engine.stdin.close()
    engine.wait()


if __name__ == "__main__":
    main()
