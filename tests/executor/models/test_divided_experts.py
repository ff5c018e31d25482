"""Experts divided among engines: the tokens and the bits of one engine with all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from quire.executor.models.experts import MixtureOfExperts
from quire.ipc.step_messages import SchedulerOutput
from quire.tests.executor.driver import Row, start_executor
from quire.tests.executor.engine_threads import EngineThreads
from quire.tests.executor.models.test_experts import stacked_copy
from quire.tests.executor.models.test_parallel_layers import random_workload
from quire.tests.executor.ranks.test_adapters_of_ranks import LORA, run, write_adapters


def bits(rows: list[Row]) -> list[Any]:
    return [
        (
            row.error,
            row.output,
            [(ids.tolist(), values.tobytes(), rank) for ids, values, rank in row.logprobs],
            [(i, values.tobytes()) for i, (_, values, _) in row.prompt_logprobs.items()],
        )
        for row in rows
    ]


def nothing(engine: Any) -> list[Row]:
    return []


def work(seed: int) -> Callable[[Any], list[Row]]:
    return partial(random_workload, seed=seed)


def check(one: Any, engines: EngineThreads, seeds: range, size: int = 2) -> None:
    """Work on all engines, or on one alone."""
    for seed in seeds:
        seeds_of_engines = [seed, *(seed + 1000 * i if seed % 3 else None for i in range(1, size))]
        works = [nothing if own is None else work(own) for own in seeds_of_engines]
        expected = [[] if own is None else bits(work(own)(one)) for own in seeds_of_engines]
        assert [bits(rows) for rows in engines.run(works)] == expected


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("mixtral", {"dtype": "bfloat16"}), ("qwen2_moe", {"dtype": "float32"})],
)
def test_two_engines_have_the_bits_of_one(tiny, tmp_path, kind: str, settings: dict) -> None:
    one = start_executor(tiny(kind), **settings)
    engines = EngineThreads(tiny(kind), tmp_path, **settings)
    check(one, engines, range(2))
    engines.shutdown()


def test_adapters_beside_divided_experts(tiny, tmp_path) -> None:
    """Requests of one engine alone have adapters; experts have none."""
    model = tiny("qwen2_moe")
    adapters = write_adapters(model, tmp_path / "adapters")
    one, engines = start_executor(model, **LORA), EngineThreads(model, tmp_path / "engines", **LORA)
    found, none = engines.run([partial(run, adapters=adapters), nothing])
    assert bits(found) == bits(run(one, adapters)) and not none
    engines.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"quantization": "int4", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_many_workloads(tiny, tmp_path, kind: str, settings: dict) -> None:
    size = 5 if kind == "gpt_oss" else 2
    one = start_executor(tiny(kind), **settings)
    engines = EngineThreads(tiny(kind), tmp_path, size, **settings)
    check(one, engines, range(25), size)
    engines.shutdown()


def test_each_engine_loads_its_experts(tiny, tmp_path) -> None:
    """Also of a checkpoint with all experts of a layer in one tensor."""
    stacked = stacked_copy(tiny("mixtral"), tmp_path / "stacked", "mixtral")
    for directory in (tiny("mixtral"), stacked):
        whole = start_executor(directory)
        engines = EngineThreads(directory, tmp_path / directory.name, size=2)
        for rank, engine in enumerate(engines.engines):
            block, expected = (
                next(
                    layer.mlp
                    for layer in worker.model.layers
                    if isinstance(layer.mlp, MixtureOfExperts)
                )
                for worker in (engine, whole)
            )
            assert list(block.own) == [2 * rank, 2 * rank + 1]
            x = torch.randn(3, 64)
            for mine, expert in zip(block.down, block.own, strict=True):
                inner = torch.randn(3, 96)
                assert torch.equal(mine(inner), expected.down[expert](inner))
            assert torch.equal(block.router.logits(x), expected.router.logits(x))
            assert engine.memory_usage()["weights_bytes"] == (
                whole.memory_usage()["weights_bytes"] - 3 * 2 * 3 * 64 * 96 * 4
            )
        engines.shutdown()


def test_requests_that_cannot_be_computed_keep_no_engine_waiting(tiny, tmp_path) -> None:
    """A step whose only row is refused runs a pass without data."""
    engines = EngineThreads(tiny("mixtral"), tmp_path)

    def step_without_rows(engine: Any) -> int:
        engine.execute_model(SchedulerOutput(0, [], [], [], []))
        return engine.expert_group.num_passes

    assert engines.run([step_without_rows, nothing])[0] == 1
    engines.shutdown()
