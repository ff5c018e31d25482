"""Engines on a GPU that is not there (tests/fake_gpu.py): nothing mixes tensors of host and device,
and tokens are those of the CPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quire import LLM, SamplingParams
from quire.tests.bundled_model import heads
from quire.tests.fake_gpu import OnGpu, fake_gpu

PROMPTS = [
    "Once upon a time, there was a little dog. The dog liked to play. " * 3,
    "One day a bird",
    "It was a",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=9, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=4, top_k=40, max_tokens=10, repetition_penalty=1.1),
]
DRAFTS = {"num_speculative_tokens": 3, "adaptive": False}
SPECULATION = {
    "draft_model": {"method": "draft_model", "model": "bundled"},
    "mtp": {"method": "mtp", "model": heads.trained("mtp")},
    "eagle3": {"method": "eagle3", "model": heads.trained("eagle3")},
}


def generate(device: str, **settings: Any) -> tuple[list[Any], dict[str, int]]:
    """Tokens and log-probabilities of all prompts, and the engine's counters."""
    sizes = {"max_model_len": 96, "max_num_seqs": 4, "num_gpu_blocks_override": 60}
    with LLM(
        "bundled",
        engine="inproc",
        device=device,
        **{"dtype": "float32", "num_threads": 1, **sizes, **settings},
    ) as llm:
        found = [
            (answer.outputs[0].token_ids, answer.outputs[0].cumulative_logprob)
            for answer in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        ]
        return found, llm.get_metrics()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return generate("cpu")[0]


def test_a_fake_gpu_refuses_what_a_gpu_refuses() -> None:
    with fake_gpu():
        x, y = torch.ones(2, 3, device="cuda"), torch.ones(2, 3)
        assert isinstance(x, OnGpu) and x.device.type == "cuda" and (x + x)[1].is_cuda
        with pytest.raises(RuntimeError, match="same device"):
            torch.add(x, y)
        with pytest.raises(TypeError, match="numpy"):
            x.numpy()
        there = y.to(x.device)
        there += x
        assert y.sum() == 6 and x.cpu().sum() == 6 and there.tolist() == [[2.0] * 3] * 2


@pytest.mark.parametrize("method", SPECULATION)
def test_drafts_change_no_token(method: str, expected: list[Any]) -> None:
    with fake_gpu():
        found, counters = generate("cuda", speculative_config=SPECULATION[method] | DRAFTS)
    assert found == expected
    assert counters["num_accepted_tokens"] > 1
