"""A server under mixed streams to which something happens every few seconds."""

from __future__ import annotations

import asyncio
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest
from quire.tests.chaos.faults import Faults, Surroundings, environment_variables, wait_until_ready
from quire.tests.chaos.traffic import Traffic, mixed_jobs, undisturbed
from quire.tests.chaos.trouble import FLAGS, TROUBLE
from quire.tests.feature_run import HYBRID_MODEL, random_model
from quire.tests.frontend.server.conftest import running_server

SEED = int(os.environ.get("CHAOS_SEED", 0)) or random.randrange(2**31)
SECONDS = float(os.environ.get("CHAOS_SECONDS", 1200))


async def cause_chaos(
    server: httpx.Client, surroundings: Surroundings, seconds: float, pause_s: tuple[float, float]
) -> tuple[Traffic, Faults]:
    rng, jobs = random.Random(SEED), mixed_jobs(SEED, length=1.0 if seconds else 0.5)
    troubled = [job for job in jobs if job.name.startswith("min_tokens")]
    body = b'{"seed": %d, "stream": true' % TROUBLE
    for job in troubled:  # in whose steps something can happen
        rest = job.body.split(b'"stream": true', 1)[1]
        jobs[jobs.index(job)] = replace(job, body=body + rest)
    jobs += [job for job in jobs if b"%d" % TROUBLE in job.body] * 3
    url = str(server.base_url)
    expected = await undisturbed(url, jobs)
    traffic, faults = Traffic(url, jobs, expected, SEED), Faults(server, surroundings, rng)
    traffic.start()
    end = time.monotonic() + seconds
    while not traffic.problems and (
        time.monotonic() < end if seconds else faults.done.total() < len(faults.kinds)
    ):
        await asyncio.sleep(rng.uniform(*pause_s))
        traffic.deaths.append(time.monotonic())
        kind = await faults.one(jobs)
        print(f"{time.strftime('%T')} {kind}: {len(traffic.answers)} streams")
        await wait_until_ready(server)
    await traffic.stop()
    await wait_until_ready(server)
    return traffic, faults


def run(
    directory: Path, seconds: float, pause_s: tuple[float, float], is_hybrid: bool = False
) -> None:
    """seconds: 0: until each fault was there once. is_hybrid: of a model with recurrent layers."""
    print(f"\nCHAOS_SEED={SEED}")
    surroundings = Surroundings(directory)
    model = (random_model(HYBRID_MODEL), "--state-checkpoint-interval", "64") if is_hybrid else ()
    flags = (
        *model,
        *FLAGS,
        "--num-threads",
        "1",
        "--engine-restarts",
        "10000",
        "--step-timeout-s",
        "3",
    )
    flags += ("--startup-timeout-s", "120")  # some are stopped while they start
    try:
        with (
            environment_variables(surroundings.environment),
            running_server(*flags, "--max-concurrent-requests", "256") as server,
        ):
            traffic, faults = asyncio.run(cause_chaos(server, surroundings, seconds, pause_s))
            state = server.get("/v1/engine/state").json()
            log = server.log()
    finally:
        surroundings.close()
    print(
        f"{len(traffic.answers)} streams, {len(traffic.problems)} problems, "
        f"{traffic.num_convicted} convicted; {dict(faults.done)}"
    )
    assert not traffic.problems, "\n".join(traffic.problems[:5]) + "\n" + log[-4000:]
    assert traffic.num_convicted <= faults.done.total() / 4
    assert state["requests"] == [], state["requests"]


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_hybrid", [False, True], ids=["bundled", "hybrid"])
def test_each_fault_once(tmp_path: Path, is_hybrid: bool) -> None:
    run(tmp_path, 0, (0.2, 1.0), is_hybrid)


@pytest.mark.chaos
@pytest.mark.timeout(SECONDS + 900)
def test_faults_for_twenty_minutes(tmp_path: Path) -> None:
    run(tmp_path, SECONDS, (5.0, 15.0))
