"""Counts of the tokens of each expert equal numpy's counts of the ids that the router chooses."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from quire import LLMEngine, SamplingParams
from quire.executor.models.experts import MixtureOfExperts
from quire.kernels.cpu.native.calls import ALL_TOKENS, CallList, Op, Step
from quire.kernels.cpu.native.library import library
from quire.kernels.cpu.native.replay import Program
from quire.tests.client_forms import closing, make_engine
from quire.tests.executor.driver import generate, start_executor
from quire.tests.executor.on_device import capture_decodes, use_forward
from quire.tests.workloads import drive, random_jobs

# some requests preempt others all the time, and prompts are cut
FEW = dict(block_size=8, max_model_len=256, num_gpu_blocks_override=34, max_num_batched_tokens=64)
NEEDS_LIBRARY = pytest.mark.skipif(library is None, reason="the native library is not built")
PROMPT = [5, 9, 250, 17, 100, 3, 3, 41, 77, 201, 6]


def worker_of(engine: LLMEngine) -> Any:
    return engine.client._engine.core.executor


def blocks_of(model: Any) -> list[MixtureOfExperts]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts)]


class Counted:
    """numpy's counts of the ids that sorting reads: [layer, expert]."""

    def __init__(self, model: Any):
        blocks = blocks_of(model)
        self.counts = np.zeros((len(blocks), blocks[0].config.count), np.int64)
        self.num_calls = 0

    def add(self, ids: np.ndarray) -> None:
        row = self.counts[self.num_calls % len(self.counts)]
        row += np.bincount(ids.ravel(), minlength=len(row))
        self.num_calls += 1


def watch_program(monkeypatch: pytest.MonkeyPatch, counted: Counted) -> None:
    """Programs run call by call, and the ids are read where they are sorted."""

    def run(self: Program, calls: CallList, step: Step) -> None:
        for call in calls.calls:
            library.run(call, step)
            if call.op == Op.SORT_BY_EXPERT:
                assert call.rows == ALL_TOKENS and call.counts
                size = step.num_tokens * call.top_k
                counted.add(np.array((ctypes.c_int32 * size).from_address(call.ids)))

    monkeypatch.setattr(Program, "run", run)


class WatchedOps:
    """An OpTable that counts the ids of each call."""

    def __init__(self, ops: Any, counted: Counted):
        self._ops, self._counted = ops, counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def route_experts(self, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = self._ops.route_experts(*args)
        self._counted.add(ids.numpy())
        return ids, weights


@NEEDS_LIBRARY
@pytest.mark.parametrize("num_scheduler_steps", [1, 4])
@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_of_random_workloads_in_native_programs(kind, num_scheduler_steps, tiny, monkeypatch):
    config = {**FEW, "dtype": "bfloat16", "num_scheduler_steps": num_scheduler_steps}
    with closing(make_engine("inproc", model=str(tiny(kind)), **config)) as engine:
        counted = Counted(worker_of(engine).model)
        watch_program(monkeypatch, counted)
        drive(engine, random_jobs(12, 300, seed=3, max_prompt=200), check=False)
        assert engine.get_metrics()["num_preemptions"] > 0
        check(engine, counted)


@pytest.mark.parametrize("kernels", [{}, {"count_experts": "reference", "fused_moe": "reference"}])
def test_of_random_workloads_operation_by_operation(kernels, tiny):
    with closing(
        make_engine("inproc", model=str(tiny("qwen3_moe")), kernels=kernels, **FEW)
    ) as engine:
        worker = worker_of(engine)
        use_forward(worker, None)
        counted = Counted(worker.model)
        for block in blocks_of(worker.model):
            block.ops = WatchedOps(block.ops, counted)
        drive(engine, random_jobs(8, 300, seed=4, max_prompt=120), check=False)
        check(engine, counted)


def check(engine: LLMEngine, counted: Counted) -> None:
    load = engine.expert_load()
    assert load["tokens"] == counted.counts.tolist()
    per_token = blocks_of(worker_of(engine).model)[0].config.per_token
    sums = counted.counts.sum(1)
    assert sums[0] > 0 and (sums == sums[0]).all() and sums[0] % per_token == 0


def test_each_token_counts_once_per_expert_and_steps_without_tokens_do_not(tiny):
    executor = start_executor(tiny("mixtral"))
    executor.initialize_swap_space()
    executor.execute_dummy_batch()
    (before,) = executor.collective_rpc("expert_load")
    assert before and not any(map(sum, before.values()))
    generate(executor, [PROMPT, PROMPT[:4]], 5)
    (after,) = executor.collective_rpc("expert_load")
    num_tokens = len(PROMPT) + 4 + 2 * (5 - 1)
    per_token = executor.model.layers[0].mlp.config.per_token
    assert [sum(tokens) for tokens in after.values()] == [num_tokens * per_token] * len(after)
    executor.execute_dummy_batch()
    assert executor.collective_rpc("expert_load") == [after]


def test_padding_of_graphs_is_not_counted(tiny):
    plain, graphed = (start_executor(tiny("qwen3_moe"), max_num_seqs=13) for _ in range(2))
    capture_decodes(graphed)
    prompts = [PROMPT[:n] for n in (3, 5, 7, 8, 11)]  # a graph of eight rows
    for executor in (plain, graphed):
        generate(executor, prompts, 6)
    assert graphed.collective_rpc("expert_load") == plain.collective_rpc("expert_load")
    assert all(one.slots is None for one in graphed.model.routed_tokens().values())


class EqualLogits(WatchedOps):
    """Every token has the experts with the lowest ids."""

    def route_experts(self, logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return super().route_experts(torch.zeros_like(logits), *args)


def test_one_expert_that_all_tokens_choose(tiny):
    with closing(make_engine("inproc", model=str(tiny("mixtral")))) as engine:
        worker = worker_of(engine)
        use_forward(worker, None)
        blocks = blocks_of(worker.model)
        for block in blocks:
            block.config = replace(block.config, per_token=1)
            block.ops = EqualLogits(block.ops, Counted(worker.model))
        engine.add_request("r", {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1))
        while engine.has_unfinished_requests():
            engine.step()
        count = blocks[0].config.count
        expected = [len(PROMPT)] + [0] * (count - 1)
        assert engine.expert_load()["tokens"] == [expected] * len(blocks)
        assert engine.call_utility("status")["experts"] == [
            (layer, count, 1 - 1 / count) for layer in range(len(blocks))
        ]


def test_models_without_experts_have_no_counts(tiny):
    with closing(make_engine("inproc", model=str(tiny("qwen3")))) as engine:
        assert engine.expert_load() == {"layers": [], "tokens": []}
        assert engine.call_utility("status")["experts"] == []
