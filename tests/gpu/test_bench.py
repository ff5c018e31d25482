"""The benchmark that a GPU is measured with: its floors against figures worked out by hand, and a run without a GPU.
May know: bench_gpu.py.
Must not know: engines."""

from __future__ import annotations

import argparse
import json

import pytest
from quire.tests.bench.bench_gpu import Bench


def bench(**arguments) -> Bench:
    return Bench(argparse.Namespace(**{"device": "cpu", "models": ["tiny"], "skip": [], "seconds": 0.01, "out": None, **arguments}))


@pytest.mark.parametrize(
    ("model", "tokens", "context", "is_prefill", "ms"),
    [
        ("0.5B", 1, 1024, False, 0.233), ("0.5B", 256, 1024, False, 1.069), ("0.6B", 64, 1024, False, 2.025), ("1.5B", 64, 1024, False, 1.155),
        ("7B", 1, 1024, False, 3.302), ("7B", 64, 1024, False, 4.162), ("7B", 8192, 0, True, 152), ("0.5B", 8192, 0, True, 11.1),
    ],
)  # fmt: skip
def test_floors_at_4_3_terabytes_and_790_teraflops(model, tokens, context, is_prefill, ms) -> None:
    counted = bench()
    counted.limits = {"bytes": 4.3e12, "flops": 790e12}
    assert 1e3 * counted.floor_s(model, tokens, context, is_prefill) == pytest.approx(ms, rel=0.02)


def test_a_run_without_a_gpu_tells_every_step_and_no_failure(capsys, tmp_path) -> None:
    dry = bench(skip=["workload", "peers"], out=str(tmp_path))
    dry.run()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line for line in told if "failed" in line] == []
    names = [line["name"] for line in told]
    steps = ["decode tiny b=1 ctx=64", "decode tiny b=4 ctx=64", "prefill tiny 32", "prefill tiny 128"]
    assert names == ["machine", "ceilings", *steps, "attention tiny decode b=4 ctx=64", "attention tiny prefill 64"]
    assert json.loads((tmp_path / "gpu.json").read_text()).keys() == set(names)


def test_a_part_that_fails_does_not_end_the_others(capsys) -> None:
    def broken(model: str) -> None:
        raise ZeroDivisionError("a bug")

    dry = bench(skip=["workload"])
    dry.steps, dry.peers = broken, lambda model: dry.tell("peers")
    dry.run()
    assert '"failed": "ZeroDivisionError: a bug"' in capsys.readouterr().out and "peers" in dry.found
