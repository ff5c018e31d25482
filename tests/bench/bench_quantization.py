"""What quantized weights cost and gain: the bundled model's perplexity, bytes and tokens/s.

    python tests/bench/bench_quantization.py [--texts 150] [--write]

In fp32, bf16, int8 and int4. The perplexity is that of each token given those before it, from
prompt_logprobs. Texts are stories, chats, JSON, sums, copies and translations from the training's
generator, with seeds that training does not use. Tokens/s are those of one greedy request and of
32, medians of alternating rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from quire import LLM, SamplingParams
from quire.tests.bench.report import hardware, write_result

DATA = Path(__file__).resolve().parents[1] / "bundled_model" / "data.py"
SEED = 30_000_000
KINDS = ("addition", "subtraction", "copy", "json", "translation", "chat", "story")
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8 cache": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
}


def make_texts(count: int) -> list[str]:
    spec = importlib.util.spec_from_file_location("quire_bundled_model_data", DATA)
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    samples = [
        getattr(data, f"{KINDS[i % len(KINDS)]}_prompt")(Random(SEED + i)) for i in range(count)
    ]
    return [sample.prompt + sample.completion for sample in samples]


def perplexity(llm: LLM, texts: list[str]) -> float:
    outputs = llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    logprobs = [
        entries[token_id].logprob
        for output in outputs
        for token_id, entries in zip(
            output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True
        )
    ]
    return math.exp(-sum(logprobs) / len(logprobs))


def tokens_per_second(llm: LLM, count: int) -> float:
    start = time.perf_counter()
    outputs = llm.generate(
        ["Once upon a time"] * count,
        SamplingParams(temperature=0, max_tokens=64, ignore_eos=True),
        use_tqdm=False,
    )
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (
        time.perf_counter() - start
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--write", action="store_true", help="append the result to tests/bench/results/"
    )
    args = parser.parse_args()
    texts, result = make_texts(args.texts), {}
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(engine="inproc", enable_prefix_caching=False, **form))
            for name, form in FORMS.items()
        }
        speeds: dict[str, dict[int, list[float]]] = {name: {1: [], 32: []} for name in llms}
        for _ in range(args.rounds):
            for name, llm in llms.items():
                for count, found in speeds[name].items():
                    found.append(tokens_per_second(llm, count))
        for name, llm in llms.items():
            [usage] = llm.collective_rpc("memory_usage")
            result[name] = {
                "perplexity": perplexity(llm, texts),
                "weights_bytes": usage["weights_bytes"],
            }
            result[name] |= {
                f"tokens_per_s_{count}": round(statistics.median(found))
                for count, found in speeds[name].items()
            }
            loss = result[name]["perplexity"] / result["float32"]["perplexity"] - 1
            print(
                f"{name:10} perplexity {result[name]['perplexity']:.4f} ({loss:+.2%})  weights "
                f"{usage['weights_bytes'] / 2**20:6.2f} MiB",
                end="",
            )
            print(
                "  tokens/s"
                + "".join(
                    f"  {count} requests: {result[name][f'tokens_per_s_{count}']}"
                    for count in speeds[name]
                ),
                flush=True,
            )
    print(hardware())
    if args.write:
        print(write_result("bundled", "quantization", {"texts": args.texts, **result}))


if __name__ == "__main__":
    main()
