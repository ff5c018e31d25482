"""What one streamed token costs the frontend's process, with an engine that computes nothing.

    python tests/bench/bench_frontend.py [--streams 64] [--tokens 100] [--rounds 20] [--step-ms 4]
    [--write]

AsyncLLM over an engine process, many streams of deltas. CPU time of the whole process (the loop and
ZMQ's thread), per token, from the socket to the reader's `async for`: receive, decode, text,
hand-over, waking the reader. The engine sleeps between its steps, so that each step wakes an idle
loop, as with a model.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import uvloop
from quire import AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from quire.frontend.clients.mp_client import MPClient
from quire.tests.bench.report import hardware, write_result
from quire.tests.fake_engine import COMMAND


async def measure(num_streams: int, num_tokens: int, num_rounds: int, step_s: float) -> list[float]:
    """Microseconds of CPU per token, by round; without the first round, which warms up."""
    args = EngineArgs(
        max_model_len=1024,
        max_num_seqs=num_streams,
        num_gpu_blocks_override=64 * num_streams + 1,
        hf_overrides={"delay_s": step_s},
    )
    config = args.create_engine_config()
    llm = AsyncLLM(config, await MPClient.start(config, command=COMMAND))
    params = SamplingParams(
        temperature=0, max_tokens=num_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    num_read = 0

    async def read(index: int) -> None:
        nonlocal num_read
        async for output in llm.generate([5 + index, 6, 7], params, f"chatcmpl-{index:032x}"):
            num_read += len(output.outputs[0].token_ids)

    costs = []
    for _ in range(num_rounds + 1):
        num_read, begin = 0, time.process_time()
        await asyncio.gather(*(read(i) for i in range(num_streams)))
        assert num_read == num_streams * num_tokens
        costs.append(1e6 * (time.process_time() - begin) / num_read)
    await llm.shutdown_async()
    return costs[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=100, help="of each stream and round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--step-ms", type=float, default=4.0, help="how long the engine rests in a step"
    )
    parser.add_argument(
        "--write", action="store_true", help="append the result to tests/bench/results/"
    )
    args = parser.parse_args()
    costs = uvloop.run(measure(args.streams, args.tokens, args.rounds, args.step_ms / 1e3))
    median, least = statistics.median(costs), min(costs)
    print(
        f"{hardware()}: {args.streams} streams, us of CPU per token: median {median:.1f}, least "
        f"{least:.1f}"
    )
    if args.write:
        print(
            write_result(
                "none",
                "frontend",
                {
                    "streams": args.streams,
                    "us_per_token": {"median": median, "least": least, "rounds": costs},
                },
            )
        )


if __name__ == "__main__":
    main()
