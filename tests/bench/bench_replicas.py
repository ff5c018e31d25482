"""Two engines of one thread each behind one client beside one engine of two threads.

    python tests/bench/bench_replicas.py [--model bundled | 0.5B] [--batches 1 8 32] [--rounds 5]
    [--prompt 128] [--max-tokens 64] [--turns]

Both are loaded, in processes of their own, and asked in turns, so that what disturbs the machine
disturbs both alike. Printed are medians over rounds: output tokens per second of all requests that
start together, and the time until the first of them, and until all of them, have a token. --turns:
prompts continue each other, as conversations do, so that routing matters.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

from quire import AsyncLLM, EngineArgs, SamplingParams
from quire.ipc.params import RequestOutputKind
from quire.tests.bench.bench_preemption import SHAPES

SIDES = {
    "one engine, two threads": {"num_threads": 2},
    "two engines, one thread each": {"num_threads": 1, "data_parallel_size": 2},
}


class Side:
    def __init__(self, llm: AsyncLLM):
        self.llm = llm
        self.num_requests = 0

    async def round(self, batch: int, args: argparse.Namespace) -> tuple[float, float, float]:
        """(output tokens/s, seconds to the first token of one request, and of all)."""
        began, first = time.perf_counter(), []

        async def one(number: int) -> None:
            self.num_requests += 1
            fresh = 5 + (0 if args.turns else self.num_requests) % 200
            prompt = [fresh, number, *(7 + i % 300 for i in range(args.prompt - 2))]
            params = SamplingParams(
                temperature=0.0,
                max_tokens=args.max_tokens,
                ignore_eos=True,
                output_kind=RequestOutputKind.DELTA,
            )
            name = str(self.num_requests)
            is_first = True
            async for _ in self.llm.generate({"prompt_token_ids": prompt}, params, name):
                if is_first:
                    first.append(time.perf_counter() - began)
                    is_first = False

        await asyncio.gather(*map(one, range(batch)))
        seconds = time.perf_counter() - began
        return batch * args.max_tokens / seconds, min(first), max(first)


async def measure(args: argparse.Namespace) -> None:
    settings = {"max_model_len": 1024, "num_gpu_blocks_override": 2600} | SHAPES[args.model]
    sides = {
        name: Side(await AsyncLLM.start(EngineArgs(**settings, **own)))
        for name, own in SIDES.items()
    }
    print("| model | batch | engines | output tokens/s | first token, last first token, s |")
    print("|---|---|---|---|---|", flush=True)
    for batch in args.batches:
        taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
        for number in range(args.rounds + 1):
            order = list(sides.items())
            for name, side in order if number % 2 else reversed(order):
                result = await side.round(batch, args)
                if number:  # the first one warms up
                    taken[name].append(result)
        for name, results in taken.items():
            rate, first, last = (statistics.median(column) for column in zip(*results))
            print(
                f"| {args.model} | {batch} | {name} | {rate:.0f} | {first:.3f}, {last:.3f} |",
                flush=True,
            )
        one, two = (taken[name] for name in SIDES)
        ratios = sorted(b[0] / a[0] for a, b in zip(one, two))
        print(
            f"two engines / one: {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
            flush=True,
        )
    for side in sides.values():
        await side.llm.shutdown_async()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(SHAPES), default="bundled")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--turns", action="store_true")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
