"""What tests of equal bits of a tiny model have in common: jobs, settings, and each job alone.

The model is one of bfloat16 on native kernels; test_bit_equalities.py has the comparison.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from quire.kernels.cpu.native.library import library
from quire.tests.client_forms import closing, make_engine
from quire.tests.test_bit_equalities import run
from quire.tests.workloads import Job, random_jobs

needs_native_kernels = pytest.mark.skipif(
    library is None, reason="native kernels are not built here; torch's do not promise this"
)

NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}


def few_blocks(num_blocks: int = 36) -> dict[str, Any]:
    """Settings with which requests preempt each other."""
    return dict(
        block_size=8, max_model_len=256, num_gpu_blocks_override=num_blocks, num_scheduler_steps=1
    )


def settings_with(few: dict[str, Any]) -> list[dict[str, Any]]:
    """Chunks, preemption of both kinds and bursts. few: of few_blocks."""
    return [
        dict(num_threads=2, max_num_batched_tokens=37),
        dict(**few, preemption_mode="recompute", enable_prefix_caching=False),
        dict(**few, preemption_mode="swap", max_num_batched_tokens=64, async_scheduling=True),
        dict(num_scheduler_steps=4, max_num_seqs=5, long_prefill_token_threshold=19),
    ]


def make_jobs(count: int, *, max_prompt: int, max_output: int, crowding: int) -> list[Job]:
    """All request log-probabilities. crowding: they arrive within so many times fewer steps."""
    found = []
    for job in random_jobs(
        count, vocab_size=300, seed=3, max_prompt=max_prompt, max_output=max_output
    ):
        params = msgspec.structs.replace(job.params, logprobs=2, stop=None, ignore_eos=True)
        found.append(replace(job, params=params, arrives_at_step=job.arrives_at_step // crowding))
    return found


def run_alone(settings: dict[str, Any], jobs: list[Job]) -> Any:
    """Each request alone: its prompt in one piece, on one thread, with an empty cache."""
    settings = settings | dict(enable_prefix_caching=False, max_num_seqs=1, num_threads=1)
    with closing(make_engine(**settings)) as engine:
        return run(engine, jobs, aborts=False)
