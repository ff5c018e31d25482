"""An hour of mixed streams with restarts: memory, descriptors, threads, blocks come back to their
level.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from dataclasses import dataclass

import httpx2 as httpx
import psutil
import pytest
from quire.tests.chaos.faults import wait_until_ready
from quire.tests.chaos.servers import engine_of
from quire.tests.chaos.traffic import Traffic, mixed_jobs, undisturbed
from quire.tests.frontend.server.conftest import running_server

SEED = int(os.environ.get("CHAOS_SEED", 0)) or random.randrange(2**31)
SECONDS = float(os.environ.get("SOAK_SECONDS", 3600))
NUM_ROUNDS = 12  # of load and rest, each with restarts
WARM_UP_ROUNDS = 4  # in which memory may grow
MAX_GROWTH = 16 * 2**20  # bytes of the server between the end of the warm-up and the end
FLAGS = ("--num-threads", "1", "--engine-restarts", "100000", "--no-access-log")


@dataclass
class Level:
    """What an idle server holds. Bytes are anonymous memory."""

    server_bytes: int
    engine_bytes: int
    descriptors: int
    threads: int
    free_blocks: int

    @classmethod
    def of(cls, server: httpx.Client) -> Level:
        process, engine = psutil.Process(server.process.pid), engine_of(server)
        assert engine is not None
        state = server.get("/v1/engine/state").json()
        assert state["requests"] == [], state["requests"]
        return cls(
            _anonymous(process.pid),
            _anonymous(engine.pid),
            process.num_fds(),
            process.num_threads(),
            state["counters"]["num_free_blocks"],
        )


def _anonymous(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "VmSwap"))


async def load(server: httpx.Client, seconds: float) -> list[Level]:
    url, rng, jobs = str(server.base_url), random.Random(SEED), mixed_jobs(SEED, length=0.3)
    expected = await undisturbed(url, jobs)
    levels, num_streams = [], 0
    for number in range(NUM_ROUNDS):
        traffic = Traffic(url, jobs, expected, SEED + number)
        traffic.start()
        end = time.monotonic() + seconds / NUM_ROUNDS
        while time.monotonic() < end:
            await asyncio.sleep(rng.uniform(0.5, 1.0) * min(60.0, seconds / NUM_ROUNDS / 2))
            if (engine := engine_of(server)) is not None:
                engine.send_signal(signal.SIGKILL)
            await wait_until_ready(server)
        await traffic.stop()
        problems = traffic.problems
        assert not problems, f"{len(problems)}: {problems[:3]}\n{server.log()[-6000:]}"
        await asyncio.sleep(2.0)  # connections close
        num_streams += len(traffic.answers)
        levels.append(Level.of(server))
        print(f"{num_streams} streams: {levels[-1]}")
    return levels


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 1200)
def test_an_hour_with_restarts() -> None:
    print(f"\nCHAOS_SEED={SEED}")
    with running_server(*FLAGS) as server:
        levels = asyncio.run(load(server, SECONDS))
    before, after = levels[WARM_UP_ROUNDS - 1], levels[-1]
    assert after.server_bytes - before.server_bytes < MAX_GROWTH, (before, after)
    assert after.descriptors <= before.descriptors + 4, (before, after)
    assert after.threads <= before.threads + 1, (before, after)
    assert len({level.free_blocks for level in levels}) == 1, levels
