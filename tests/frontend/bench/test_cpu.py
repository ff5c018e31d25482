"""What a step must read and compute, compared with a model's own counts; phases compared with their
limits.
"""

from __future__ import annotations

import subprocess

import msgspec
import pytest
from quire import EngineArgs, QuireError
from quire.frontend.bench import cpu
from quire.frontend.bench.cpu import CpuLimits, ModelWork, StepPlan, model_work, run_plan
from quire.frontend.model_info.model_sizes import kv_bytes_per_token, measure_model
from quire.tests.executor.weights.test_gguf import needs_native
from quire.tests.gguf_checkpoints import write_gguf
from quire.tests.tiny_models import save_tiny_model

LIMITS = CpuLimits({1: 1e9, 2: 3e9}, {"bfloat16": 1e10, "float32": 4e10})


def bundled(**arguments):
    return EngineArgs(dtype="bfloat16", **arguments).create_engine_config()


def test_weights_equal_the_models_without_norms_and_biases() -> None:
    config = bundled()
    work, sizes = model_work(config), measure_model(config.model_config.hf_config)
    assert (
        0.99 * sizes.weights_bytes("bfloat16")
        < work.weights_bytes
        < sizes.weights_bytes("bfloat16")
    )
    assert (
        work.kv_bytes_per_token
        == kv_bytes_per_token(sizes.config, "bfloat16")
        == ModelWork(sizes.config, "bfloat16", None, "fp8").kv_bytes_per_token * 2
    )
    assert ModelWork(sizes.config, "bfloat16", "int8").weights_bytes * 2 == work.weights_bytes
    assert (
        ModelWork(sizes.config, "bfloat16", "int4").weights_bytes
        == work.layer_weights / 2 + work.head_weights
    )


@needs_native
@pytest.mark.parametrize(("type", "bits"), [("Q8_0", 8.5), ("Q4_0", 4.5), ("F16", 16)])
def test_blocks_of_files_are_read_as_they_are(type: str, bits: float, tmp_path) -> None:
    checkpoint = save_tiny_model(tmp_path / "model", "llama", hidden_size=64, head_dim=32)
    write_gguf(tmp_path / "m.gguf", checkpoint, type)
    work = model_work(bundled(model=str(tmp_path / "m.gguf")))
    weights = work.layer_weights + work.head_weights
    assert work.weights_bytes / weights == pytest.approx(bits / 8, rel=0.02)
    assert work.quantized == (type != "F16")  # products of int8 are the limit


def test_work_grows_with_rows_and_context() -> None:
    work = model_work(bundled())
    one, many = work.decode(1, 0), work.decode(8, 0)
    assert (many.weight_flops, many.attention_flops) == (
        8 * one.weight_flops,
        8 * one.attention_flops,
    )
    assert many.num_bytes - one.num_bytes == 7 * work.kv_bytes_per_token
    assert work.decode(1, 100).num_bytes - one.num_bytes == 100 * work.kv_bytes_per_token
    assert work.prefill(1) == one  # a prompt of one token
    # each token sees itself
    assert [work.prefill(n).attention_flops for n in (2, 4)] == [
        3 * one.attention_flops,
        10 * one.attention_flops,
    ]
    assert one.attention_flops > 0
    # the head runs only for the last token
    assert work.prefill(3).weight_flops - one.weight_flops == 4 * work.layer_weights


def test_limits() -> None:
    assert (LIMITS.bandwidth(1), LIMITS.bandwidth(2), LIMITS.bandwidth(3), LIMITS.flops(False)) == (
        1e9,
        3e9,
        3e9,
        4e10,
    )
    in_int8 = CpuLimits({1: 1e9}, {"bfloat16": 2e9, "float32": 1e9, "int8": 5e9})
    assert (in_int8.flops(False), in_int8.flops(True)) == (2e9, 5e9)
    assert CpuLimits({1: 5e9, 2: 3e9}, {"float32": 1.0}).bandwidth(2) == 5e9
    assert cpu.StepWork(6e9, 8e10, 3e10).arithmetic_seconds(4e10, 1e10) == 5.0


def test_a_plan_fits_the_engine() -> None:
    plan = StepPlan([(1, 1000), (32, 100)], [500], 1.0)
    assert plan.max_num_seqs == 32 and plan.max_model_len == 1000 + cpu.ROOM
    assert plan.kv_cache_bytes(10, 16) >= 10 * (32 * (100 + cpu.ROOM) + plan.max_model_len)


def test_the_programs_output_becomes_phases(monkeypatch) -> None:
    jobs = []
    turns = [  # of a machine that is four times as fast in the second third
        {"seconds": [0.4, 0.6, 0.5], "read_bandwidth": [1e9, 9e9, 0.5e9], "gemm_flops": [3e12]},
        {"seconds": [0.1, 0.1, 0.2], "read_bandwidth": [4e9], "gemm_flops": [2e12]},
        {"seconds": [0.4], "read_bandwidth": [1e9], "gemm_flops": [1e12]},
    ]

    def run(command, *, input, stdout, check):
        jobs.append(msgspec.json.decode(input))
        result = {
            "num_threads": 2,
            "read_bandwidth": {"1": 1e9, "2": 3e9},
            "gemm_flops": {"float32": 4e10, "int8": 8e10},
            "decode": [
                {"batch": 1, "context": 9, "turns": turns},
                {
                    "batch": 1,
                    "context": 9,
                    "turns": [
                        {
                            "seconds": [0.3],
                            "read_bandwidth": [1e15],
                            "gemm_flops": [1e10, 3e10, 2e10],
                        }
                    ],
                },
            ],
            "prefill": [
                {
                    "batch": 1,
                    "context": 64,
                    "turns": [{"seconds": [5.0], "read_bandwidth": [], "gemm_flops": []}],
                }
            ],
        }
        return subprocess.CompletedProcess(command, 0, msgspec.json.encode(result))

    monkeypatch.setattr(cpu.subprocess, "run", run)
    config = bundled()
    work = model_work(config)
    limits, [decode, computed, prefill] = run_plan(
        config, StepPlan([(1, 9)], [64], 0.5), work, None
    )
    assert (
        jobs[0]["weights_bytes"] == work.weights_bytes
        and jobs[0]["measure_limits"]
        and jobs[0]["config"]["model_config"]["dtype"] == "bfloat16"
    )
    assert limits.read_bandwidth == {1: 1e9, 2: 3e9}
    least_s = work.decode(1, 9).num_bytes / 1e9
    assert (decode.seconds, decode.fastest_s, decode.bound, decode.bandwidth, decode.flops) == (
        0.4,
        0.1,
        "memory",
        1e9,
        2e12,
    )
    assert decode.least_s == pytest.approx(least_s) and decode.fraction == pytest.approx(
        sorted([least_s / 0.5, least_s / 4 / 0.1, least_s / 0.4])[1]
    )
    assert (computed.bound, computed.flops) == (
        "arithmetic",
        2e10,
    ) and computed.least_s == pytest.approx(work.decode(1, 9).arithmetic_seconds(2e10, 4e10))
    assert (prefill.bandwidth, prefill.flops) == (3e9, 4e10)
    assert (prefill.name, prefill.bound) == (
        "prefill",
        "arithmetic",
    ) and prefill.least_s == pytest.approx(work.prefill(64).arithmetic_seconds(4e10, 4e10))
    run_plan(config, StepPlan([(1, 9)], [64], 0.5), work, limits)
    assert not jobs[1]["measure_limits"]  # they are known


def test_a_program_that_fails_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(
        cpu.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 3, b"")
    )
    config = bundled()
    with pytest.raises(QuireError, match="ended with code 3"):
        run_plan(config, StepPlan([(1, 9)], [], 0.5), model_work(config), None)
