"""When swapping is faster than recomputing, by the length of a request and for a whole batch.

    python tests/bench/bench_preemption.py [--rounds 5] [--write]

Measures the cost to restore one request, and a batch that does not fit its KV cache. Uses the
bundled model, and one of the shape of a half-billion model with random weights.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from quire import LLM, EngineArgs, SamplingParams
from quire.executor.preemption_costs import shortest_time
from quire.executor.worker import Worker
from quire.ipc.step_messages import NewRequestData, SchedulerOutput
from quire.tests.bench.report import hardware, write_result

LENGTHS = (16, 64, 256, 1024)
BIG = dict(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    head_dim=64,
    vocab_size=4096,
)
SHAPES = {"bundled": {}, "0.5B": dict(hf_overrides=BIG, load_format="dummy")}


def measure_one_request(arguments: dict) -> list[dict]:
    """For each length: seconds to compute that many tokens at once, and to copy their blocks out
    and in.
    """
    config = EngineArgs(
        max_model_len=1536, max_num_seqs=2, max_num_batched_tokens=2048, swap_space=1.0, **arguments
    ).create_engine_config()
    executor = Worker(config)
    executor.load_model(lambda stage, fraction: None)
    executor.initialize_kv_cache(executor.determine_num_blocks())
    executor.initialize_swap_space()
    runner, block_size = executor.runner, config.cache_config.block_size
    rows = []
    for length in LENGTHS:
        blocks = list(range(1, 1 + -(-length // block_size)))
        params = SamplingParams(temperature=0.0, seed=0)

        def recompute(
            length: int = length, blocks: list[int] = blocks, params: SamplingParams = params
        ) -> None:
            new = NewRequestData(0, "r", [7] * length, length, params)
            runner.execute_model(SchedulerOutput(0, [0], [length], [0], [blocks], [new]))
            runner.execute_model(SchedulerOutput(1, [], [], [], [], freed_slots=[0]))

        def swap(blocks: list[int] = blocks) -> None:
            runner.execute_model(
                SchedulerOutput(0, [], [], [], [], blocks_to_swap_out=[(b, b - 1) for b in blocks])
            )
            runner.execute_model(
                SchedulerOutput(0, [], [], [], [], blocks_to_swap_in=[(b - 1, b) for b in blocks])
            )

        rows.append(
            {
                "tokens": length,
                "recompute_ms": 1e3 * shortest_time(recompute, 5),
                "swap_ms": 1e3 * shortest_time(swap, 5),
            }
        )
    executor.shutdown()
    return rows


def measure_batch(
    arguments: dict, rounds: int, num_requests: int, num_output: int
) -> dict[str, dict]:
    """The same requests in a cache for a third of them, with each mode in interleaved rounds:
    median seconds, and the number of preemptions by kind.
    """
    rng = random.Random(0)
    prompts = [
        [rng.randrange(300, 1000) for _ in range(rng.randint(64, 192))] for _ in range(num_requests)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    num_blocks = 1 + sum(-(-(len(p) + num_output) // 16) for p in prompts) // 3
    settings = dict(
        max_model_len=320,
        max_num_seqs=num_requests,
        num_gpu_blocks_override=num_blocks,
        enable_prefix_caching=False,
        engine="inproc",
    )
    llms = {
        mode: LLM(preemption_mode=mode, **settings, **arguments)
        for mode in ("recompute", "swap", "auto")
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in llms}
    for round_ in range(rounds + 1):
        for mode, llm in llms.items():
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if round_:
                seconds[mode].append(time.perf_counter() - start)
    results = {}
    for mode, llm in llms.items():
        metrics = llm.get_metrics()
        names = ("num_preemptions", "num_recomputed_tokens", "num_blocks_swapped_out")
        results[mode] = {
            "median_s": statistics.median(seconds[mode]),
            **{name: metrics[name] // (rounds + 1) for name in names},
        }
        llm.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--write", action="store_true", help="append the results to tests/bench/results/"
    )
    args = parser.parse_args()
    for name, arguments in SHAPES.items():
        by_length = measure_one_request(arguments)
        for row in by_length:
            print(
                f"{name}: {row['tokens']:5d} tokens: recompute {row['recompute_ms']:8.2f} ms, swap "
                f"out and in {row['swap_ms']:7.2f} ms"
            )
        # would take minutes for the other model
        batch = measure_batch(arguments, args.rounds, 32, 96) if name == "bundled" else {}
        for mode, figures in batch.items():
            print(f"{name}: batch, {mode}: {figures}")
        if args.write:
            print(
                write_result(
                    name,
                    "preemption",
                    {"hardware": hardware(), "by_length": by_length, "batch": batch},
                )
            )


if __name__ == "__main__":
    main()
