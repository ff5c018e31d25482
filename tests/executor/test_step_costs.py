"""The program that measures steps: it uses the executor like a scheduler and prints JSON."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest
from quire.executor import step_costs
from quire.executor.step_costs import Job, Result, StepTimer
from quire.kernels.cpu import limits
from quire.tests.executor.driver import make_config, start_executor


def test_decode_steps_continue_from_their_context(tiny, monkeypatch):
    arguments = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    executor, seen = start_executor(tiny(), **arguments), []
    monkeypatch.setattr(
        executor,
        "execute_model",
        lambda step, run=executor.execute_model: seen.append(step) or run(step),
    )
    timer = StepTimer(executor, make_config(tiny(), **arguments), 100)
    times = timer.decode(3, 40, seconds=0.0)
    assert (times.batch, times.context, len(times.seconds)) == (
        3,
        40,
        step_costs.STEPS_OF_TURN,
    ) and min(times.seconds) > 0
    assert [step.num_computed_tokens for step in seen[:-1]] == [
        [40 + i] * 3 for i in range(1 + step_costs.STEPS_OF_TURN)
    ]
    blocks = [block for row in seen[0].new_block_ids for block in row]
    assert len(set(blocks)) == len(blocks) and 0 not in blocks and seen[-1].freed_slots == [0, 1, 2]

    seen.clear()
    times = timer.decode(1, 8, seconds=60.0)  # as many as fit
    assert (len(times.turns), len(seen)) == (step_costs.MAX_TURNS, step_costs.MAX_STEPS + 1)

    seen.clear()
    times = timer.prefill(40, seconds=0.0)
    assert (times.context, len(times.seconds)) == (40, 1)
    assert [(step.num_computed_tokens, step.num_scheduled_tokens) for step in seen[:-1]] == [
        ([0], [16]),
        ([16], [16]),
        ([32], [8]),
    ]
    executor.shutdown()


def test_a_job_from_limits_to_phases(tiny, monkeypatch):
    monkeypatch.setattr(limits, "GEMM_SHAPES", ((4, 32, 48),))
    job = Job(
        make_config(tiny(), max_num_seqs=2),
        [(1, 8), (2, 8)],
        [20],
        seconds=0.001,
        weights_bytes=2**16,
        measure_limits=True,
    )
    result = step_costs.run(msgspec.json.decode(msgspec.json.encode(job), type=Job))
    assert [(times.batch, times.context) for times in result.decode + result.prefill] == [
        (1, 8),
        (2, 8),
        (1, 20),
    ]
    assert list(result.read_bandwidth) == [result.num_threads] == [1]
    for turn in (turn for times in result.decode for turn in times.turns):
        assert len(turn.seconds) == step_costs.STEPS_OF_TURN
        for rates in (turn.read_bandwidth, turn.gemm_flops):
            assert len(rates) == step_costs.READS_OF_TURN and min(rates) > 0
    assert result.gemm_flops.keys() == {"bfloat16", "float32", "int8"}


@pytest.mark.slow
def test_the_program(tiny):
    job = Job(make_config(tiny()), [(1, 4)], seconds=0.001)
    command = [sys.executable, "-m", "quire.executor.step_costs"]
    done = subprocess.run(
        command, input=msgspec.json.encode(job), stdout=subprocess.PIPE, check=True
    )
    result = msgspec.json.decode(done.stdout, type=Result)
    assert result.read_bandwidth == {} and [
        (times.batch, times.context) for times in result.decode
    ] == [(1, 4)]
    assert all(turn.read_bandwidth == turn.gemm_flops == [] for turn in result.decode[0].turns)


def test_a_failed_row_is_an_error(tiny, monkeypatch):
    executor = start_executor(tiny())
    for layer in executor.model.attention_layers():
        layer.value_cache.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="a row failed: "):
        StepTimer(executor, make_config(tiny()), 100).decode(1, 8, 0.0)
    executor.shutdown()
