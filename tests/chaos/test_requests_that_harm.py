"""Over HTTP: a request that ends the engine each time, and steps that hang."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from unittest import mock

import httpx2 as httpx
import psutil
import pytest
from quire.frontend.bench.http_client import HttpClient
from quire.tests.chaos.servers import engine_of
from quire.tests.chaos.traffic import TIMEOUT_S, Answer, Job, ask, mixed_jobs, undisturbed
from quire.tests.chaos.trouble import FLAGS, POISON, TROUBLE
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import running_server

STEP_TIMEOUT_S = 2.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trouble")


@pytest.fixture(scope="module")
def server(directory: Path):
    flags = (
        "--num-threads",
        "1",
        "--engine-restarts",
        "1000",
        "--step-timeout-s",
        str(STEP_TIMEOUT_S),
    )
    with (
        mock.patch.dict(os.environ, CHAOS_DIRECTORY=str(directory)),
        running_server(*FLAGS, *flags) as client,
    ):
        yield client


def seeded(seed: int) -> Job:
    body = {
        "prompt": "Once upon a time",
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": seed,
        "max_tokens": 800,
        "ignore_eos": True,
    }
    return Job(f"seed {seed}", "/v1/completions", json.dumps(body).encode(), True)


async def run_all(server: httpx.Client, jobs: list[Job], harm) -> dict[str, Answer]:
    """The jobs' answers, all asked at once; `harm` is called when the first has an output."""
    client = HttpClient(str(server.base_url), {}, TIMEOUT_S)
    answers = {job.name: Answer() for job in jobs}
    tasks = [asyncio.create_task(ask(client, job, answers[job.name])) for job in jobs]
    while not answers[jobs[0].name].times:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(harm)
    await asyncio.gather(*tasks)
    return answers


def assert_undisturbed(answers: dict[str, Answer], expected, jobs: list[Job]) -> None:
    problems = [answers[job.name].problem(expected[job.name], job) for job in jobs]
    assert not any(problems), [problem for problem in problems if problem][:3]


def count(server: httpx.Client, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


# each normal run has the same in tests/frontend/supervision/test_supervised_client.py
@pytest.mark.chaos
def test_a_poison_request_ends_alone(server: httpx.Client) -> None:
    jobs, poison = mixed_jobs(1, 22, length=0.4), seeded(POISON)
    expected = asyncio.run(undisturbed(str(server.base_url), jobs))
    before = count(server, "quire:engine_restarts_total")
    answers = asyncio.run(run_all(server, [*jobs, poison], lambda: None))
    assert_undisturbed(answers, expected, jobs)
    failure = answers[poison.name].failure
    assert failure is not None and "engine_crash" in failure, failure
    assert 2 <= count(server, "quire:engine_restarts_total") - before <= 7


@pytest.mark.chaos  # in each normal run without HTTP, see test_supervised_client.py
def test_a_poison_request_that_is_alone_ends_after_two_deaths(server: httpx.Client) -> None:
    before = count(server, "quire:engine_restarts_total")
    answers = asyncio.run(run_all(server, [job := seeded(POISON)], lambda: None))
    assert answers[job.name].failure is not None
    assert count(server, "quire:engine_restarts_total") - before == 2


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# each normal run has test_health.py, over HTTP, and test_supervised_client.py
@pytest.mark.chaos
@pytest.mark.parametrize("hang", ["stopped", "spin"])
def test_a_hanging_step_is_noticed_and_streams_continue(
    server: httpx.Client, hang: str, directory: Path
) -> None:
    troubled = seeded(TROUBLE)
    jobs = [troubled, *mixed_jobs(2, 12, length=0.4)]
    expected = asyncio.run(undisturbed(str(server.base_url), jobs))
    noticed = []

    def harm() -> None:
        engine = engine_of(server)
        assert engine is not None
        began = time.monotonic()
        if hang == "stopped":
            os.kill(engine.pid, signal.SIGSTOP)
        else:
            (directory / "spin").touch()
        wait_until(lambda: server.get("/health/ready").status_code == 503)
        noticed.append(time.monotonic() - began)
        wait_until(lambda: is_gone(engine), 20)
        noticed.append(time.monotonic() - began)

    answers = asyncio.run(run_all(server, jobs, harm))
    assert_undisturbed(answers, expected, jobs)
    print(f"\n{hang}: not ready after {noticed[0]:.1f} s, ended after {noticed[1]:.1f} s")
    assert noticed[0] < 10 and noticed[1] < STEP_TIMEOUT_S + 10  # two and one on an idle machine
