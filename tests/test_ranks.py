"""Engines of several ranks, from LLM to their processes: a rank that is killed loses no request."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from quire import LLM, SamplingParams
from quire.tests.tiny_models import save_tiny_model

ARGUMENTS = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 256,
    "kv_cache_memory_bytes": 2**24,
    "max_num_seqs": 16,  # two stages have two steps in flight, of eight requests
}
# requests that draft are swapped out and in
FEW = {
    "speculative_config": {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False},
    "preemption_mode": "swap",
    "num_gpu_blocks_override": 60,
}


def ranks() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "quire.executor.ranks.rank" in child.cmdline()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [("tensor_parallel_size", {}), ("pipeline_parallel_size", {}), ("pipeline_parallel_size", FEW)],
)
def test_requests_continue_after_any_rank_is_killed(
    tmp_path: Path, name: str, settings: dict
) -> None:
    model = str(save_tiny_model(tmp_path, "qwen2"))
    params = SamplingParams(max_tokens=200, temperature=0.8, seed=3, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1 + i, 2, 3] * 3} for i in range(20)]
    with LLM(model, **ARGUMENTS) as one:
        wanted = [output.outputs[0].token_ids for output in one.generate(prompts, params)]
    with LLM(model, **{name: 2}, **settings, **ARGUMENTS) as several:
        for victim in range(2):
            killed = ranks()
            assert len(killed) == 2
            timer = threading.Timer(0.2, os.kill, (killed[victim].pid, signal.SIGKILL))
            timer.start()
            outputs = several.generate(prompts, params)
            timer.join()
            assert [output.outputs[0].token_ids for output in outputs] == wanted
            assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 20
            assert not any(process.is_running() for process in killed)
            if settings:  # requests were preempted, and drafts verified
                metrics = several.get_metrics()
                assert metrics["num_blocks_swapped_in"] and metrics["num_draft_tokens"]
        left = ranks()
        assert len(left) == 2
    time.sleep(0.1)
    assert not any(process.is_running() for process in left)
