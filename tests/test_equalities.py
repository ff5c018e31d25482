"""Two hundred random requests give the same outputs on every path that must agree, and leave nothing behind.
May know: the public API, the bundled model, psutil.
Must not know: how any of the paths works."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import psutil
import pytest
from quire import EngineArgs, LLMEngine
from quire.tests.workloads import assert_same, drive, random_jobs

JOBS = random_jobs(200, vocab_size=1500, seed=1)
MANY_BLOCKS, FEW_BLOCKS = 500, 20  # 20 blocks of 16 tokens: two or three long requests fill them, so others are preempted all the time


def make_engine(engine: str = "inproc", **settings) -> LLMEngine:
    # One thread: with several, tests of a tiny model on a busy machine wait for each other more than they compute.
    defaults = dict(dtype="float32", max_model_len=192, max_num_seqs=32, num_gpu_blocks_override=MANY_BLOCKS, max_num_batched_tokens=2048, num_threads=1)
    return LLMEngine.from_engine_args(EngineArgs(**{**defaults, **settings}), engine=engine)


@pytest.fixture(scope="module")
def expected():
    engine = make_engine(enable_prefix_caching=False)
    try:
        return drive(engine, JOBS, aborts=False)
    finally:
        engine.shutdown()


def assert_empty(engine: LLMEngine, num_blocks: int) -> None:
    state = engine.client.call_utility("scheduler_state")
    assert state["running"] == [] and state["waiting"] == [], state
    metrics = engine.client.call_utility("get_metrics")
    assert metrics["num_free_blocks"] == num_blocks - 1, metrics  # all but the null block
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    "settings",
    [
        dict(max_num_batched_tokens=16),
        dict(max_num_batched_tokens=64),
        dict(max_num_batched_tokens=2048),
        dict(enable_prefix_caching=False, max_num_batched_tokens=64),
        dict(num_gpu_blocks_override=FEW_BLOCKS),
        dict(num_gpu_blocks_override=FEW_BLOCKS, enable_prefix_caching=False, max_num_batched_tokens=64),
        dict(num_gpu_blocks_override=FEW_BLOCKS, scheduling_policy="priority", max_num_batched_tokens=128),
        dict(scheduling_policy="priority", max_num_seqs=5, long_prefill_token_threshold=37),
    ],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()),
)
def test_settings_do_not_change_outputs(expected, settings):
    engine = make_engine(**settings)
    try:
        assert_same(JOBS, drive(engine, JOBS), expected)
        assert_empty(engine, settings.get("num_gpu_blocks_override", MANY_BLOCKS))
        if settings.get("num_gpu_blocks_override") == FEW_BLOCKS:
            assert engine.client.call_utility("get_metrics")["num_preemptions"] > 20  # else the test would show nothing
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


@pytest.mark.parametrize("client", ["inproc", "process"])
def test_clients_do_not_change_outputs_and_leave_nothing(expected, client):
    make_engine(client).shutdown()  # what is loaded once per process (libraries, OpenMP's threads) is not a leak
    gc.collect()
    before = _resources()
    engine = make_engine(client, max_num_batched_tokens=256, num_gpu_blocks_override=200)
    sockets = _socket_files()
    try:
        assert_same(JOBS, drive(engine, JOBS), expected)
        assert_empty(engine, 200)
    finally:
        engine.shutdown()
    del engine
    gc.collect()
    assert _resources() == before
    assert not [path for path in sockets if Path(path).exists()]


def test_requests_one_at_a_time_give_the_same(expected):
    engine = make_engine()
    try:
        for job in JOBS[:40]:
            assert_same([job], drive(engine, [job], aborts=False, check=False), expected, aborts=False)
    finally:
        engine.shutdown()


def _resources() -> tuple:
    process = psutil.Process()
    return process.num_fds(), sorted(t.name for t in threading.enumerate()), process.children(recursive=True)


def _socket_files() -> list[str]:
    return [c.laddr for c in psutil.Process().net_connections(kind="unix") if isinstance(c.laddr, str) and c.laddr.startswith("/")]
