"""Ranks on GPUs of one machine, connected by NCCL: the tokens of one GPU, the same in every run,
and what a rank's death does. Skipped without two GPUs.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from quire import LLM, SamplingParams
from quire.ipc.errors import EngineDeadError
from quire.tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ARGUMENTS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
}
SIZES: list[dict[str, Any]] = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
PROMPTS = [[5, 6, 7], [40], list(range(60, 300)), *([n, n + 1, 2 * n] for n in range(3, 36))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("gpu") / "qwen3", "qwen3", seed=3)


def run(llm: LLM, max_tokens: int = 24) -> list[list[int]]:
    """Greedy and random requests, some with log-probabilities, which the host computes."""
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2),
            top_p=0.9,
            seed=i,
            max_tokens=max_tokens,
            logprobs=1 if i % 5 == 0 else None,
            ignore_eos=True,
        )
        for i in range(len(PROMPTS))
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all(output.outputs[0].finish_reason == "length" for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_tokens_are_those_of_one_gpu(model, size: dict[str, Any]) -> None:
    with LLM(str(model), **ARGUMENTS) as one:
        wanted = run(one)
    with LLM(str(model), **ARGUMENTS, **size) as several:
        assert run(several) == wanted
        assert run(several) == wanted


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_graphs_with_collectives(model, size: dict[str, Any]) -> None:
    """The tokens of ranks that run operation by operation, also from graphs that are captured again
    after sleep and for other weights. All ranks capture the same sizes, as steps ask for them.
    """
    with LLM(str(model), **ARGUMENTS, **size, enforce_eager=True) as eager:
        wanted = run(eager)
    with LLM(str(model), **ARGUMENTS, **size) as graphed:
        assert run(graphed) == wanted
        for level in (1, 2):
            graphed.sleep(level)
            graphed.wake_up()
            assert run(graphed) == wanted
        graphed.load_weights(str(model))
        assert run(graphed) == wanted


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_memory_stays_within_the_limit(model, size: dict[str, Any]) -> None:
    """With what NCCL takes on each GPU."""
    used = [total - free for free, total in map(torch.cuda.mem_get_info, (0, 1))]
    total = torch.cuda.mem_get_info(0)[1]
    share = max(used) / total + 0.3
    limit = {"gpu_memory_utilization": share, "max_num_seqs": 4096}
    with LLM(str(model), **(ARGUMENTS | size | limit)) as several:
        run(several)
        for number in (0, 1):
            free, total = torch.cuda.mem_get_info(number)
            assert total - free <= (share + 0.02) * total


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_killed_rank_ends_the_engine_with_its_cause(model, size: dict[str, Any]) -> None:
    """The other one waits in an operation of NCCL, and is gone too."""
    arguments = {**ARGUMENTS, **size, "on_engine_death": "fail"}
    with LLM(str(model), **arguments) as several, ThreadPoolExecutor(1) as thread:
        outputs = thread.submit(run, several, 900)
        time.sleep(1.0)
        ranks = [
            process
            for process in psutil.Process().children(recursive=True)
            if "quire.executor.ranks.rank" in process.cmdline()
        ]
        assert len(ranks) == 2 and not outputs.done()
        ranks[1].kill()
        with pytest.raises(EngineDeadError, match="rank 1 of 2"):
            outputs.result(timeout=30)
        assert not psutil.wait_procs(ranks, timeout=10)[1]
