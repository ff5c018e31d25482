"""The engine is killed again and again under streams of a real server, and no byte differs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import time

import httpx2 as httpx
import pytest
from quire.tests.chaos.servers import engine_of
from quire.tests.chaos.traffic import Traffic, gaps, mixed_jobs, undisturbed
from quire.tests.frontend.server.conftest import running_server

SEED = int(os.environ.get("CHAOS_SEED", 0)) or random.randrange(2**31)
FLAGS = ("--num-threads", "1", "--engine-restarts", "10000", "--max-concurrent-requests", "256")


async def kill_at_random(server: httpx.Client, number: int, rng: random.Random) -> list[float]:
    """Kills the engine so often; returns when. Most times while it generates or resumes requests,
    sometimes while it starts.
    """
    moments: list[float] = []
    for _ in range(number):
        if rng.random() < 0.95:
            await asyncio.sleep(0.1)  # until the death is noticed
            while server.get("/health/ready").status_code != 200:
                await asyncio.sleep(0.02)
        await asyncio.sleep(rng.uniform(0.0, 4.0))
        if (engine := engine_of(server)) is not None:
            engine.send_signal(signal.SIGKILL)
            moments.append(time.monotonic())
    return moments


def run_with_kills(number: int) -> None:
    print(f"\nCHAOS_SEED={SEED}")
    jobs = mixed_jobs(SEED)

    async def main(server: httpx.Client) -> tuple[Traffic, list[float]]:
        expected = await undisturbed(str(server.base_url), jobs)
        traffic = Traffic(str(server.base_url), jobs, expected, SEED)
        traffic.start()
        moments = await kill_at_random(server, number, random.Random(SEED))
        await traffic.stop()
        return traffic, moments

    with running_server(*FLAGS) as server:
        traffic, moments = asyncio.run(main(server))
        metrics = server.get("/metrics").text
        log = server.log()
    seen = gaps(traffic.answers, moments)
    lines = [line for line in metrics.splitlines() if line.startswith("quire:engine_restart")]
    print(
        f"{number} kills, {len(traffic.answers)} streams, {len(traffic.problems)} problems; gaps "
        f"of {len(seen)} streams: median {statistics.median(seen):.2f} s, "
        f"longest {max(seen):.2f} s",
        *[line for line in lines if "total" in line or "sum" in line or "count" in line],
        sep="\n",
    )
    print(log) if os.environ.get("CHAOS_LOG") else None
    assert not traffic.problems, "\n".join(traffic.problems[:5]) + "\n" + log[-3000:]


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [3, 50])
def test_kills(number: int) -> None:
    """A kill or two are in each normal run, see test_chaos.py."""
    run_with_kills(number)
