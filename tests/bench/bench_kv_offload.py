"""The second visit to a long conversation: first token with blocks outside the cache, and without.

    python -P -m quire.tests.bench.bench_kv_offload [--tokens 8192] [--rounds 3] [--places file]

A 0.5B's shape in bfloat16 with random weights. A round is a first visit, which is a prefill, then
sleep and wake_up, which store the blocks and take the cache away, and a second visit. A time is
that of a request for one token: seconds, and CPU seconds of the process, which other programs
disturb less. The tokens of both visits must be equal.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time

from quire import LLM, SamplingParams
from quire.tests.bench.bench_preemption import BIG
from quire.tests.bench.report import hardware, write_result

BLOCK_SIZE = 16


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, float, int]:
    """Return the seconds and the CPU seconds to it, and the token."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    [output] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - begin_cpu
    return seconds, cpu_s, output.outputs[0].token_ids[0]


def measure(arguments: argparse.Namespace, **settings) -> dict[str, list[tuple[float, float]]]:
    num_tokens, rng = arguments.tokens, random.Random(0)
    times: dict[str, list[tuple[float, float]]] = {"first": [], "second": []}
    with LLM(
        engine="inproc",
        dtype="bfloat16",
        num_threads=arguments.threads,
        max_model_len=num_tokens + 64,
        num_gpu_blocks_override=(num_tokens + 64) // BLOCK_SIZE + 2,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        load_format="dummy",
        hf_overrides=BIG | {"max_position_embeddings": 2 * num_tokens},
        **settings,
    ) as llm:
        for _ in range(arguments.rounds):
            prompt = rng.choices(range(1000), k=num_tokens)
            *first, token = first_token(llm, prompt)
            begin = time.perf_counter()
            llm.sleep(1)
            print(f"stored in {time.perf_counter() - begin:.3f} s")
            llm.wake_up()
            *second, again = first_token(llm, prompt)
            assert token == again
            print(f"first visit {first}, second {second}", flush=True)
            times["first"].append((first[0], first[1]))
            times["second"].append((second[0], second[1]))
        metrics = llm.get_metrics()
        num_blocks = arguments.rounds * ((num_tokens - 1) // BLOCK_SIZE)
        assert metrics["num_blocks_reloaded"] == num_blocks, metrics
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--places", nargs="+", default=["memory", "file"])
    parser.add_argument("--write", action="store_true", help="keep the figures in results/")
    arguments = parser.parse_args()
    print(hardware())
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for place in arguments.places:
            where = {"kv_offloading_path": folder} if place == "file" else {}
            times = measure(arguments, kv_offloading_size=1.0, **where)
            for kind, index in (("seconds", 0), ("CPU seconds", 1)):
                first, second = (
                    statistics.median(time[index] for time in times[visit])
                    for visit in ("first", "second")
                )
                print(
                    f"{place}, {kind}: {first:.3f}, then {second:.3f}: {first / second:.1f} times"
                )
            results[place] = times
    if arguments.write:
        write_result("0.5B", "kv_offload", {"arguments": vars(arguments)} | results)


if __name__ == "__main__":
    main()
