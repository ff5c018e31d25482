"""What prompt_logprobs costs: seconds and peak memory of one long prompt with a large vocabulary.

    python tests/bench/bench_prompt_logprobs.py [--prompt 8192] [--vocab 151936] [--hidden 64]
    [--chunk 2048] [--dtype float32] [--write]

Without prompt_logprobs, with few and with 20. The model is small except for its vocabulary and has
random weights, so nearly all its work is logits. Every measurement is a separate process. Memory is
the peak of its resident set beyond the size with model and cache loaded (the kernel's counter,
reset at that point).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from quire.tests.bench.report import hardware, write_result

CASES = {"none": None, "0": 0, "5": 5, "20": 20}


def status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def measure(
    directory: str, prompt_logprobs: int | None, args: argparse.Namespace
) -> dict[str, float]:
    from quire.tests.executor.driver import Driver, greedy, start_executor

    executor = start_executor(
        directory,
        load_format="dummy",
        dtype=args.dtype,
        max_model_len=args.prompt + 16,
        max_num_batched_tokens=args.chunk,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**28,
        num_threads=args.threads,
    )
    driver = Driver(executor)
    driver.add("warm", [1] * 20, greedy(prompt_logprobs=prompt_logprobs))
    driver.run(1)
    driver.free(driver.rows["warm"])
    prompt = random.Random(0).choices(range(args.vocab), k=args.prompt)
    row = driver.add("r", prompt, greedy(prompt_logprobs=prompt_logprobs))
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status_mib("VmRSS"), time.perf_counter()
    driver.run(1, chunk=lambda row: args.chunk)
    seconds = time.perf_counter() - start
    assert len(row.prompt_logprobs) == (0 if prompt_logprobs is None else args.prompt - 1)
    return {"seconds": round(seconds, 2), "peak_mib": round(status_mib("VmHWM") - before)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--write", action="store_true", help="append the result to tests/bench/results/"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(measure(args.worker, CASES[args.case], args)))
        return
    from quire.tests.tiny_models import make_tiny_config

    with tempfile.TemporaryDirectory() as directory:
        sizes = {
            "vocab_size": args.vocab,
            "hidden_size": args.hidden,
            "num_hidden_layers": 1,
            "max_position_embeddings": args.prompt + 16,
        }
        config = make_tiny_config("qwen2", architectures=["Qwen2ForCausalLM"], **sizes)
        config.save_pretrained(directory)
        numbers = {}
        for case in CASES:
            command = [
                sys.executable,
                __file__,
                *sys.argv[1:],
                "--worker",
                directory,
                "--case",
                case,
            ]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            numbers[case] = json.loads(done.stdout.splitlines()[-1])
            print(
                f"prompt_logprobs {case:>4}: {numbers[case]['seconds']:7.2f} s, peak "
                f"{numbers[case]['peak_mib']} MiB",
                flush=True,
            )
    print(hardware())
    if args.write:
        described = {
            "prompt": args.prompt,
            "vocab": args.vocab,
            "hidden": args.hidden,
            "chunk": args.chunk,
            "dtype": args.dtype,
        }
        print(
            write_result(
                "random-qwen2",
                f"prompt-logprobs-{args.prompt}x{args.vocab}",
                {**described, "threads": args.threads, **numbers},
            )
        )


if __name__ == "__main__":
    main()
