"""`quire bench cpu` with the bundled model: figures, files, errors, and the points of a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from quire import EngineArgs, InvalidParameterError
from quire.frontend.bench import cpu
from quire.frontend.bench.cpu import ROOM, CpuLimits, Phase, StepPlan, model_work
from quire.frontend.cli.bench_cpu import BATCHES, cpu_parser, draw, fitting, format_limits, sweeps
from quire.ipc.config import EngineConfig
from quire.tests.frontend.cli import command


def call(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    return command.call(capsys, "bench", "cpu", *arguments)


@pytest.mark.slow
def test_phases_are_compared_with_their_limits(
    capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    words = [
        "--seconds",
        "0.01",
        "--batch-sizes",
        "1",
        "3",
        "--context",
        "40",
        "--prefill-len",
        "30",
        "--num-threads",
        "1",
        "--json",
        str(path),
    ]
    code, out, _ = call(capsys, *words)
    assert (
        code == 0
        and out.startswith("this machine reads ")
        and "multiplies matrices at bfloat16 " in out
    )
    found = json.loads(path.read_text())
    assert [(p["name"], p["batch"], p["context"]) for p in found["phases"]] == [
        ("decode", 1, 40),
        ("decode", 3, 40),
        ("prefill", 1, 30),
    ]
    assert all(
        p["bandwidth"] > 0 and p["fraction"] == pytest.approx(p["least_s"] / p["seconds"])
        for p in found["phases"]
    )
    assert found["limits"]["read_bandwidth"]["1"] > 0 and found["machine"]["num_cores"] >= 1


def test_the_defaults_fit_the_bundled_model(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default prompt is as long as the model's context and leaves room for its answer."""
    measured: list[StepPlan] = []

    def measure(config: EngineConfig, plan: StepPlan, *_: Any) -> tuple[CpuLimits, list[Phase]]:
        assert config.model_config.max_model_len >= plan.max_model_len
        assert config.device_config.device == "cpu"
        measured.append(plan)
        return CpuLimits({1: 1e9}, {"float32": 1e9}), []

    monkeypatch.setattr(cpu, "run_plan", measure)
    code, _, err = call(capsys)
    assert (code, err) == (0, "")
    context = EngineArgs().create_engine_config().model_config.max_model_len
    assert measured == [StepPlan([(1, 128), (32, 128)], [context - ROOM], 1.0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "0"], "--context: must be at least 1, got 0"),
        (["--batch-sizes", "4", "0"], "--batch-sizes: must be at least 1, got 0"),
        (["--seconds", "0"], "--seconds: must be more than 0, got 0.0"),
        (["--svg", "nowhere"], "--svg: must be a directory, got 'nowhere'"),
        (["--context", "9999999"], "--context: must leave room for "),
        (["--device", "cuda"], "--device: must be 'cpu', got 'cuda'"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture, arguments: list[str], message: str) -> None:
    code, _, err = call(capsys, *arguments)
    assert code != 0 and message in err


def test_a_sweep_varies_one_value_at_a_time() -> None:
    config = EngineArgs(max_model_len=600).create_engine_config()
    args = cpu_parser([]).parse(["--context", "100"])
    found = sweeps(config, args, 600, most_threads=3)
    assert [name for name, _, _ in found] == [
        "requests",
        "tokens of context",
        "threads",
        "threads",
        "threads",
    ]
    assert [batch for batch, _ in found[0][2].decode] == list(BATCHES)
    assert found[1][2].decode == [(1, 128), (1, 512)]
    assert [part.device_config.num_threads for _, part, _ in found[2:]] == [1, 2, 3]


def test_an_engine_fits_its_plan() -> None:
    config = EngineArgs(max_model_len=300).create_engine_config()
    made = fitting(config, StepPlan([(5, 100)], [200], 1.0), model_work(config))
    assert made.scheduler_config.max_num_seqs == 5
    with pytest.raises(InvalidParameterError, match="maximum is 300"):
        fitting(config, StepPlan([(1, 290)], [], 1.0), model_work(config))


def test_limits_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = format_limits(CpuLimits({1: 2e9, 2: 3.5e9}, {"float32": 1.5e11}))
    assert (
        "2.0 GB/s with 1 thread, 3.5 GB/s with 2 threads" in text and "float32 150 GFLOP/s" in text
    )
    phases = [
        Phase("decode", batch, 9, 1, 0.1 * batch, 0.1, 1e9, 1e11, 0.05 * batch, "memory", 0.5)
        for batch in (1, 2)
    ]
    draw(tmp_path, {"requests": phases})
    assert (tmp_path / "cost-of-requests.svg").read_text().count("<polyline") == 2
