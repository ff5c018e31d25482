"""The first token of a prompt that another engine has computed, and of one that none has.

    python -P -m quire.tests.bench.bench_kv_transfer [--tokens 8192] [--rounds 3]

A 0.5B's shape in bfloat16 with random weights. In a round a producer, which is a process of its own
and idle afterwards, computes a prompt, and a consumer is asked for its first token; then the
consumer is asked for that of another prompt, which it computes itself. A time is that of a request
for one token: seconds, and CPU seconds of the consumer's process. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile

from quire import LLM
from quire.tests.bench.bench_kv_offload import BLOCK_SIZE, first_token
from quire.tests.bench.bench_preemption import BIG
from quire.tests.bench.report import hardware, write_result


def engine(arguments: argparse.Namespace, form: str, transfer: dict) -> LLM:
    num_tokens = arguments.tokens
    return LLM(
        engine=form,
        dtype="bfloat16",
        num_threads=arguments.threads,
        max_model_len=num_tokens + 64,
        num_gpu_blocks_override=2 * (num_tokens + 64) // BLOCK_SIZE,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        load_format="dummy",
        hf_overrides=BIG | {"max_position_embeddings": 2 * num_tokens},
        kv_offloading_size=arguments.gib,
        kv_transfer_config=transfer,
    )


def measure(arguments: argparse.Namespace, folder: str) -> dict[str, list[tuple[float, float]]]:
    rng, address = random.Random(0), f"ipc://{folder}/kv"
    times: dict[str, list[tuple[float, float]]] = {"pulled": [], "computed": []}
    sends = {"kv_role": "kv_producer", "endpoint": address}
    pulls = {"kv_role": "kv_consumer", "peers": [address], "timeout_s": 60.0}
    with (
        engine(arguments, "process", sends) as producer,
        engine(arguments, "inproc", pulls) as consumer,
    ):
        for _ in range(arguments.rounds):
            for kind in times:
                prompt = rng.choices(range(1000), k=arguments.tokens)
                expected = first_token(producer, prompt)[2] if kind == "pulled" else None
                seconds, cpu_s, token = first_token(consumer, prompt)
                assert expected in (None, token)
                times[kind].append((seconds, cpu_s))
                print(f"{kind}: {seconds:.3f} s, {cpu_s:.3f} CPU seconds", flush=True)
        metrics = consumer.get_metrics()
        num_blocks = arguments.rounds * ((arguments.tokens - 1) // BLOCK_SIZE)
        assert metrics["num_blocks_pulled"] == num_blocks, metrics
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gib", type=float, default=1.0, help="kv_offloading_size")
    parser.add_argument("--write", action="store_true", help="keep the figures in results/")
    arguments = parser.parse_args()
    print(hardware())
    with tempfile.TemporaryDirectory() as folder:
        times = measure(arguments, folder)
    for index, kind in enumerate(("seconds", "CPU seconds")):
        pulled, computed = (
            statistics.median(time[index] for time in times[one]) for one in ("pulled", "computed")
        )
        print(
            f"{kind}: computed {computed:.3f}, pulled {pulled:.3f}: {computed / pulled:.1f} times"
        )
    if arguments.write:
        write_result("0.5B", "kv_transfer", {"arguments": vars(arguments)} | times)


if __name__ == "__main__":
    main()
