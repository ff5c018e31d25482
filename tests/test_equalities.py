"""Many random requests give the same outputs on every path that must agree. Nothing is leaked."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import psutil
import pytest
from quire import LLMEngine
from quire.tests.client_forms import (
    ASYNCIO,
    BLOCKING,
    MANY_BLOCKS,
    blocking_engine,
    make_async_engine,
    make_engine,
)
from quire.tests.fake_engine import wait_until
from quire.tests.workloads import assert_same, drive, drive_async, random_jobs

JOBS = random_jobs(60, vocab_size=1500, seed=1)
# One request of the longest kind fits; the others preempt each other all the time.
FEW = dict(block_size=8, num_gpu_blocks_override=50)


@pytest.fixture(scope="module")
def expected():
    engine = make_engine(enable_prefix_caching=False)
    try:
        return drive(engine, JOBS, aborts=False)
    finally:
        engine.shutdown()


def assert_empty(engine: LLMEngine, num_blocks: int) -> None:
    state = engine.client.call_utility("scheduler_state")
    assert state["running"] == state["waiting"] == state["swapped"] == [], state
    metrics = engine.client.call_utility("get_metrics")
    assert metrics["num_free_blocks"] == num_blocks - 1, metrics  # all but the null block
    assert not engine.has_unfinished_requests()


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize(
    "settings",
    [
        dict(max_num_batched_tokens=16),
        dict(max_num_batched_tokens=64),
        dict(max_num_batched_tokens=2048),
        dict(enable_prefix_caching=False, max_num_batched_tokens=64),
        dict(**FEW),
        dict(**FEW, enable_prefix_caching=False, max_num_batched_tokens=64),
        dict(**FEW, scheduling_policy="priority", max_num_batched_tokens=128),
        dict(scheduling_policy="priority", max_num_seqs=5, long_prefill_token_threshold=37),
        dict(**FEW, preemption_mode="swap", enable_prefix_caching=False),
        dict(**FEW, preemption_mode="recompute"),
        dict(num_scheduler_steps=4, max_num_batched_tokens=64),
        dict(async_scheduling=True, max_num_batched_tokens=64),
        dict(**FEW, async_scheduling=True, num_scheduler_steps=3, preemption_mode="swap"),
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_settings_do_not_change_outputs(expected, settings):
    engine = make_engine(**settings)
    try:
        assert_same(JOBS, drive(engine, JOBS), expected)
        assert_empty(engine, settings.get("num_gpu_blocks_override", MANY_BLOCKS))
        if settings.items() >= FEW.items():
            # otherwise the test would prove nothing
            assert engine.client.call_utility("get_metrics")["num_preemptions"] > 5
    finally:
        engine.shutdown()


def test_a_warm_prefix_cache_does_not_change_outputs(expected):
    engine = make_engine()
    try:
        drive(engine, JOBS, aborts=False)
        warm = drive(engine, JOBS, aborts=False)
        assert_same(JOBS, warm, expected, aborts=False)
        hits = [result.num_cached_tokens for result in warm.values()]
        assert sum(hits) > 0.5 * sum(len(job.prompt_token_ids) for job in JOBS)
    finally:
        engine.shutdown()


# the contract suite (tests/frontend/clients/test_client.py) has every form in each run
FORMS = [
    pytest.param(form, marks=pytest.mark.slow) if form == "process" else form
    for form in BLOCKING + ASYNCIO
]


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize("client", FORMS)
def test_clients_do_not_change_outputs_and_leak_nothing(expected, client, tmp_path):
    # what a process loads once (libraries, threads) is not a leak
    make_engine("inproc" if "inproc" in client else "process").shutdown()
    gc.collect()
    before = _resources()
    got, sockets = run_async(client) if client in ASYNCIO else run_blocking(client, tmp_path)
    assert_same(JOBS, got, expected)
    gc.collect()
    wait_until(lambda: _resources() == before)  # a thread takes a moment to end
    assert not [path for path in sockets if Path(path).exists()]


SMALL = dict(max_num_batched_tokens=256, num_gpu_blocks_override=200)


def run_blocking(client: str, directory: Path) -> tuple[dict, list[str]]:
    with blocking_engine(client, directory, **SMALL) as engine:
        sockets = _socket_files()
        results = drive(engine, JOBS)
        assert_empty(engine, SMALL["num_gpu_blocks_override"])
        return results, sockets


def run_async(client: str) -> tuple[dict, list[str]]:
    async def main():
        engine = make_async_engine(client, **SMALL)
        try:
            sockets = _socket_files()
            results = await drive_async(engine, JOBS)
            # aborts on their way
            while (state := await engine.call_utility("scheduler_state"))["running"] or state[
                "waiting"
            ]:
                await asyncio.sleep(0.01)
            assert await engine.call_utility("check_integrity")
            assert (await engine.get_metrics())["num_free_blocks"] == SMALL[
                "num_gpu_blocks_override"
            ] - 1
            return results, sockets
        finally:
            engine.shutdown()

    return asyncio.run(main())


def test_requests_one_at_a_time_give_the_same_outputs(expected):
    engine = make_engine()
    try:
        for job in JOBS[:40]:
            assert_same(
                [job], drive(engine, [job], aborts=False, check=False), expected, aborts=False
            )
    finally:
        engine.shutdown()


def _resources() -> tuple:
    process = psutil.Process()
    return (
        process.num_fds(),
        sorted(t.name for t in threading.enumerate()),
        process.children(recursive=True),
    )


def _socket_files() -> list[str]:
    return [
        c.laddr
        for c in psutil.Process().net_connections(kind="unix")
        if isinstance(c.laddr, str) and c.laddr.startswith("/")
    ]
