"""Families whose layers keep states, through the engine: requests beside each other, prompts in
chunks, and a second turn that starts from a checkpoint give the tokens and log-probabilities of
transformers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quire import LLM, SamplingParams
from quire.tests.tiny_models import save_tiny_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=10, logprobs=3, ignore_eos=True)


@torch.inference_mode()
def assert_as_transformers(model: torch.nn.Module, prompt: list[int], output: Any) -> None:
    """Every token is the most likely one after its predecessors, with its log-probability."""
    answer = output.outputs[0]
    tokens = [*prompt, *answer.token_ids]
    expected = model(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    assert list(answer.token_ids) == expected.argmax(-1).tolist()
    for row, found in zip(expected, answer.logprobs, strict=True):
        for token, logprob in found.items():
            assert abs(logprob.logprob - row[token].item()) < 1e-4


@pytest.mark.parametrize(
    "kind",
    [
        *("granitemoehybrid", "falcon_h1", "bamba", "nemotron_h", "mamba2"),
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "lfm3"),
        "kimi_linear",
    ],
)
def test_tokens_and_logprobs_are_those_of_transformers(kind: str, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    directory = save_tiny_model(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(300, (n,), generator=generator).tolist() for n in (5, 70, 33)]
    arguments = dict(model=str(directory), dtype="float32", max_model_len=256)
    with LLM(**arguments, engine="inproc", max_num_batched_tokens=32, max_num_seqs=4) as llm:

        def generate(prompts: list[list[int]]) -> list[Any]:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(asked, PARAMS, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                assert_as_transformers(model, prompt, output)
            return outputs

        first = generate(prompts)[1]
        (second,) = generate([[*prompts[1], *first.outputs[0].token_ids, *prompts[0]]])
        assert second.num_cached_tokens == 64
