"""The statistics log line: its times and contents. The table of counters, and a test that triggers
each error counter.
"""

from __future__ import annotations

import asyncio
import logging
import re

import pytest
from quire import AsyncLLM, EngineDeadError, InvalidParameterError, LLMEngine, SamplingParams
from quire.frontend.clients.inproc_client import InprocClient
from quire.frontend.telemetry import stats as stats_module
from quire.frontend.telemetry.stats import StatsLogger, format_line
from quire.ipc.counters import TEXTS, SchedulerStats
from quire.tests.fake_engine import TroubledExecutor
from quire.tests.frontend.tiny_tokenizers import text_config


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(stats_module, "time", clock)
    return clock


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "quire.stats")
    return lambda: [record.message for record in caplog.records if record.name == "quire.stats"]


def busy(prompt: int, generated: int, **fields) -> SchedulerStats:
    return SchedulerStats(
        **{"num_running": 1, "num_free_blocks": 75, "num_blocks": 101, **fields},
        num_prompt_tokens=prompt,
        num_generation_tokens=generated,
    )


def idle(prompt: int, generated: int) -> SchedulerStats:
    return busy(prompt, generated, num_running=0)


# ------------------------------------------------------------ the line


def test_contents_of_the_line():
    base = busy(100, 10, prefix_cache_queries=50, prefix_cache_hits=50)
    now = busy(
        600,
        260,
        num_running=3,
        num_waiting=4,
        num_swapped=5,
        prefix_cache_queries=250,
        prefix_cache_hits=100,
    )
    assert format_line(base, now, 10.0) == (
        "prompt throughput: 50.0 tokens/s, generation throughput: 25.0 tokens/s, running: 3, "
        "waiting: 4, swapped: 5, "
        "KV cache usage: 25.0%, prefix cache hit rate: 25.0%"
    )
    assert format_line(now, now, 10.0).endswith("prefix cache hit rate: 0.0%")


def test_one_line_per_interval_while_outputs_come(clock, lines):
    log = StatsLogger(10.0)
    log.begin()
    for second in range(1, 36):
        clock.now += 1.0
        log.record(busy(0, second * 7))
    assert len(lines()) == 3 and all(
        "generation throughput: 7.0 tokens/s" in line for line in lines()
    )


def test_silent_when_idle_after_one_last_line(clock, lines):
    log = StatsLogger(10.0)
    log.begin()
    clock.now += 2.0
    log.record(idle(0, 20))  # the first work ends before the interval is over and is still logged
    assert [re.search(r"generation throughput: (\S+)", line).group(1) for line in lines()] == [
        "10.0"
    ]
    clock.now += 3600.0
    log.begin()
    log.begin()
    clock.now += 4.0
    log.record(busy(0, 40))
    assert len(lines()) == 1
    clock.now += 1.0
    log.record(idle(0, 70))
    # 50 tokens in 5 s, not in an hour
    assert [re.search(r"generation throughput: (\S+)", line).group(1) for line in lines()] == [
        "10.0",
        "10.0",
    ]


def test_short_requests_do_not_flood_the_log(clock, lines):
    log = StatsLogger(10.0)
    for second in range(1, 31):
        log.begin()
        clock.now += 1.0
        log.record(idle(0, second))
    assert 2 <= len(lines()) <= 4


def test_no_rate_is_negative_after_a_restart(clock, lines):
    log = StatsLogger(10)
    log.begin()
    log.record(busy(1000, 500), epoch=0)
    clock.now += 10
    log.record(busy(100, 40), epoch=1)  # the next engine counts from 0
    assert lines()[-1].startswith("prompt throughput: 10.0 tokens/s, generation throughput: 4.0 ")


def test_an_engine_shared_with_others_does_not_start_at_zero(clock, lines):
    log = StatsLogger(10.0, shares_engine=True)
    log.begin()
    clock.now += 1.0
    log.record(busy(10**9, 10**9))
    clock.now += 10.0
    log.record(busy(10**9, 10**9 + 50))
    assert ["generation throughput: 5.0" in line for line in lines()] == [True]


def make_engine(**arguments) -> LLMEngine:
    config = text_config(**arguments)
    return LLMEngine(config, InprocClient(config, executor=TroubledExecutor(config)))


def run(engine: LLMEngine) -> dict:
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    return last


GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def test_the_line_of_a_running_engine(lines):
    engine = make_engine(log_stats_interval_s=1e-9)
    engine.add_request("a", [1, 2, 3], GREEDY)
    run(engine)
    assert (
        len(lines()) == 8
        and "running: 1, waiting: 0, swapped: 0" in lines()[0]
        and "running: 0" in lines()[-1]
    )
    assert engine.step() == [] and len(lines()) == 8
    engine.shutdown()


def test_no_line_when_statistics_are_off(lines):
    engine = make_engine(log_stats_interval_s=1e-9, disable_log_stats=True)
    engine.add_request("a", [1, 2, 3], GREEDY)
    run(engine)
    assert lines() == [] and engine.stats is None
    engine.shutdown()


def test_the_line_in_asyncio(lines):
    async def main() -> None:
        config = text_config(log_stats_interval_s=1e-9)
        llm = AsyncLLM(config, InprocClient(config, executor=TroubledExecutor(config)))
        [_ async for _ in llm.generate([1, 2, 3], GREEDY, "a")]
        assert llm.stats is not None
        llm.shutdown()

    asyncio.run(main())
    assert len(lines()) == 8


# ------------------------------------------------------------ the table of counters


def test_the_table_lists_every_metric():
    engine = make_engine()
    metrics = engine.get_metrics()
    assert list(metrics) == list(TEXTS)
    gauges = {"num_running", "num_waiting", "num_swapped", "num_free_blocks", "num_blocks"}
    assert {name for name, value in metrics.items() if value} <= gauges
    engine.shutdown()


def nonzero(engine: LLMEngine) -> dict[str, int]:
    """Return the error counters that are not 0."""
    well = {
        "num_prompt_tokens",
        "num_generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_free_blocks",
        "num_blocks",
    }
    return {
        name: value for name, value in engine.get_metrics().items() if value and name not in well
    }


def refused_here(engine: LLMEngine) -> None:
    with pytest.raises(InvalidParameterError):
        engine.add_request("a", [], GREEDY)


def failing_utility(engine: LLMEngine) -> None:
    with pytest.raises(InvalidParameterError):
        engine.pause("never")


def not_finite(engine: LLMEngine) -> None:
    request = engine.session.process("a", [1, 2, 3], GREEDY)
    engine.client._engine.core.executor.nan_rows.add((request.core_request.request_id, 2))
    engine.session.submit(request)
    assert "not finite" in run(engine)["a"].error


def aborted(engine: LLMEngine) -> None:
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    engine.abort_request("a")
    engine.client.get_output()


def preempted(engine: LLMEngine) -> None:
    engine.add_request("a", list(range(1, 40)), GREEDY)
    engine.step()
    engine.reset_prefix_cache(reset_running=True)
    assert run(engine)["a"].metrics.num_preemptions == 1


def bad_frames(engine: LLMEngine) -> None:
    # as MPClient counts them: test_engine_proc.test_fuzz_towards_the_client
    engine.client.num_bad_frames += 2


def of_an_old_engine(engine: LLMEngine) -> None:
    engine.session.output_processor._epochs[0] = 5
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    engine.session.output_processor._epochs[0] = 0
    engine.abort_request("a")
    engine.client.get_output()


@pytest.mark.parametrize(
    ("provoke", "counted"),
    [
        (refused_here, {"num_inputs_refused": 1}),
        (failing_utility, {"num_failed_utilities": 1}),
        (not_finite, {"num_finished_error": 1}),
        (aborted, {"num_finished_abort": 1}),
        (preempted, {"num_finished_length": 1, "num_preemptions": 1, "num_recomputed_tokens": 39}),
        (bad_frames, {"num_bad_engine_frames": 2}),
        (of_an_old_engine, {"num_dropped_rows": 1, "num_finished_abort": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_error_counters(provoke, counted):
    """Tested elsewhere: refused, orphaned and finish reasons in tests/core/test_request_timing.py,
    bad frames in test_mp_client.py and test_engine_proc.py, lost outputs and overflows in
    tests/ipc/test_engine_output.py and tests/core/test_engine_proc.py.
    """
    engine = make_engine()
    provoke(engine)
    assert nonzero(engine) == counted
    engine.shutdown()


def test_counters_of_a_dead_engine_are_unavailable():
    engine = make_engine(hf_overrides={"raise_at_step": 0})
    engine.add_request("a", [1, 2, 3], GREEDY)
    with pytest.raises(EngineDeadError):
        engine.step()
    with pytest.raises(EngineDeadError):
        engine.get_metrics()
