"""Whole prompts and decode steps at long contexts: Quire and others' llama-bench on one GGUF file.

    python tests/bench/make_gguf.py 0.5B-layers LAYERS.gguf --type Q8_0
    python tests/bench/make_gguf.py 0.5B-layer LAYER.gguf --type Q8_0
    python tests/bench/bench_long_peers.py LAYERS.gguf --less LAYER.gguf [--peer NAME=DIRECTORY …]
        [--contexts 16000 32000] [--caches plain int8] [--threads 2] [--rounds 3]

The times of LAYER.gguf are subtracted, so that those of four layers are left. This matters:
llama.cpp and ik_llama.cpp compute the last layer's feed-forward network for those tokens alone
whose logits are read, Quire for all tokens. With one layer, that is most of a short prompt.

DIRECTORY has a llama-bench of llama.cpp or ik_llama.cpp. The engines take turns. The plain cache is
bf16 in Quire and f16 elsewhere, the int8 one `kv_cache_dtype=int8` and `-ctk q8_0 -ctv q8_0`. Quire
is LLM with the engine in a child process, with its defaults. A decode step follows a prompt of so
many tokens; Quire finds that in its prefix cache, and its time is that of 1 + STEPS tokens less
that of one. `floor` is the least time for the arithmetic of a whole prompt, products with weights
in int8 and half of the attention in the faster of bf16 and fp32, at the rates that Quire's own and
torch's products reach in the same round. The table has medians of rounds, ratios of each round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
from collections import defaultdict
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from quire import LLM, SamplingParams
from quire.executor.device import set_num_threads
from quire.frontend.bench.cpu import ModelWork, model_work
from quire.kernels.cpu.limits import gemm_flops
from quire.tests.bench.report import hardware
from quire.tests.executor.driver import make_config

STEPS = 32
LAST_TOKEN = 8000  # of random prompts; each vocabulary has so many
PEER_CACHES = {"plain": [], "int8": ["-ctk", "q8_0", "-ctv", "q8_0"]}
Seconds = dict[str, float]  # "prompt", "step"


def seconds_of_quire(llm: LLM, context: int) -> Seconds:
    prompt = {"prompt_token_ids": random.choices(range(100, LAST_TOKEN), k=context)}

    def run(num_tokens: int) -> float:
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        began = perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        return perf_counter() - began

    whole, one = run(1), run(1)
    return {"prompt": whole, "step": (run(1 + STEPS) - one) / STEPS}


def seconds_of_peer(directory: Path, model: str, threads: int, cache: str, context: int) -> Seconds:
    program = directory / "llama-bench"
    environment = os.environ | {"LD_LIBRARY_PATH": str(directory)}

    def run(*options: str) -> str:
        found = subprocess.run(
            [str(program), *options], capture_output=True, text=True, env=environment, check=True
        )
        return found.stdout

    knows_depth = "--n-depth" in run("-h")
    common = ["-m", model, "-t", str(threads), "-fa", "1", "-r", "1", "-o", "json"]
    common += PEER_CACHES[cache]
    [prompt] = json.loads(run(*common, "-p", str(context), "-n", "0"))
    depth = ["-n", str(STEPS), "-d", str(context)]
    if not knows_depth:  # ik_llama.cpp
        depth = ["-n", "0", "-gp", f"{context},{STEPS}"]
    [steps] = json.loads(run(*common, "-p", "0", *depth))
    return {"prompt": prompt["avg_ns"] / 1e9, "step": steps["avg_ns"] / 1e9 / STEPS}


def floor(work: ModelWork, context: int) -> float:
    fastest = max(gemm_flops(dtype, 0.5) for dtype in (torch.bfloat16, torch.float32))
    return work.prefill(context).arithmetic_seconds(gemm_flops(torch.int8, 0.5), fastest)


def measured(
    args: argparse.Namespace, model: str, cache: str, context: int
) -> dict[str, list[Seconds]]:
    """By engine, one per round, and "floor"."""
    config = make_config(model, dtype="bfloat16")
    work = model_work(config)
    found = defaultdict[str, list[Seconds]](list)
    settings = {"kv_cache_dtype": "int8"} if cache == "int8" else {}
    with LLM(
        model,
        num_threads=args.threads,
        max_model_len=context + STEPS + 1,
        skip_tokenizer_init=True,
        **settings,
    ) as llm:
        engines = {"Quire": partial(seconds_of_quire, llm)}
        for name, directory in args.peer:
            engines[name] = partial(seconds_of_peer, directory, model, args.threads, cache)
        for _ in range(args.rounds):
            for name, seconds in engines.items():
                found[name].append(seconds(context))
            found["floor"].append({"prompt": floor(work, context)})
    return found


def less(found: dict[str, list[Seconds]], by: dict[str, list[Seconds]]) -> dict[str, list[Seconds]]:
    return {
        name: [
            {kind: seconds - b[kind] for kind, seconds in a.items()}
            for a, b in zip(rounds, by[name], strict=True)
        ]
        for name, rounds in found.items()
    }


def row(found: dict[str, list[Seconds]], kind: str) -> str:
    """Of each engine seconds or milliseconds, and how much longer than Quire it took. Of the floor
    how much longer Quire took.
    """
    cells = []
    for name, rounds in found.items():
        if kind not in rounds[0]:
            continue
        median = statistics.median(one[kind] for one in rounds)
        cell = f"{median:.2f} s" if kind == "prompt" else f"{1e3 * median:.2f} ms"
        ratio = statistics.median(
            a[kind] / b[kind] for a, b in zip(rounds, found["Quire"], strict=True)
        )
        if name == "floor":
            cell += f" (Quire {1 / ratio:.2f} times)"
        elif name != "Quire":
            cell += f" ({ratio:.2f} times)"
        cells.append(f"{name} {cell}")
    return " | ".join(cells)


def peer(text: str) -> tuple[str, Path]:
    name, _, directory = text.partition("=")
    return name, Path(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--less", help="a file with fewer layers, whose times are subtracted")
    parser.add_argument("--peer", type=peer, action="append", default=[])
    parser.add_argument("--contexts", type=int, nargs="+", default=[16000, 32000])
    parser.add_argument("--caches", nargs="+", choices=list(PEER_CACHES), default=["plain", "int8"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    set_num_threads(args.threads)
    print(f"{hardware()}, {args.threads} threads, {Path(args.model).name}")
    for context in args.contexts:
        for cache in args.caches:
            found = measured(args, args.model, cache, context)
            if args.less:
                found = less(found, measured(args, args.less, cache, context))
            for kind in ("prompt", "step"):
                print(f"| {context} | {cache} | {kind} | {row(found, kind)} |", flush=True)


if __name__ == "__main__":
    main()
