"""The gap that a stream sees when its engine is killed, with and without a standby.

    python -P -m quire.tests.bench.bench_restart [MODEL] [--standby] [--rounds 9]

One stream at a time; the engine gets SIGKILL after 16 tokens. The gap is from the signal to the
next token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time

import psutil
from quire import AsyncLLM, EngineArgs, SamplingParams
from quire.ipc.params import RequestOutputKind
from quire.tests.bench.report import hardware

TOKENS_BEFORE = 16


async def gap(llm: AsyncLLM, request_id: str) -> float | None:
    """None if the stream ended before the engine was dead."""
    params = SamplingParams(
        max_tokens=800, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )
    num_tokens, killed_at, num_restarts = 0, 0.0, 0
    seconds: float | None = None
    async for output in llm.generate({"prompt_token_ids": [5] * 64}, params, request_id):
        now = time.perf_counter()
        if killed_at and seconds is None:
            # tokens that were on their way when the engine died do not count
            if llm.client.restarts.by_cause.total() == num_restarts:
                continue
            seconds = now - killed_at
        num_tokens += len(output.outputs[0].token_ids)
        if num_tokens >= TOKENS_BEFORE and not killed_at:
            num_restarts = llm.client.restarts.by_cause.total()
            killed_at = time.perf_counter()
            os.kill(llm.client.engine_pid, signal.SIGKILL)
    return seconds


async def measure(args: argparse.Namespace) -> None:
    engine_args = EngineArgs(
        model=args.model, standby=args.standby, engine_restarts=1000, max_model_len=2048
    )
    llm = await AsyncLLM.start(engine_args)
    gaps = []
    for i in range(args.rounds):
        while llm.client.standby_is_ready is False:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1.0)
        if (seconds := await gap(llm, f"r{i}")) is not None:
            gaps.append(seconds)
        while llm.client.restarts.by_cause.total() <= i:
            await asyncio.sleep(0.1)
    while llm.client.standby_is_ready is False:
        await asyncio.sleep(0.1)
    print(hardware())
    print("gaps, s: " + " ".join(f"{seconds:.3f}" for seconds in gaps))
    print(f"median {statistics.median(gaps):.3f} s, longest {max(gaps):.3f} s")
    for process in psutil.Process().children():
        memory, idle = process.memory_full_info(), process.cpu_percent(1.0)
        print(
            f"process {process.pid}: private {memory.uss / 2**20:.0f} MiB, shared in part "
            f"{(memory.pss - memory.uss) / 2**20:.0f} MiB, resident {memory.rss / 2**20:.0f} MiB; "
            f"{idle:.1f} % of a core while idle"
        )
    await llm.shutdown_async()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--standby", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
