"""The engine on a GPU: the tokens of the CPU's engine with and without graphs, within its memory
limit. Skipped without a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quire import LLM, SamplingParams
from quire.ipc.errors import NotEnoughMemoryError
from quire.tests.executor.test_fake_gpu import DRAFTS, SPECULATION, generate
from quire.tests.tiny_models import KINDS, save_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ARGUMENTS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 40,
    "max_num_batched_tokens": 256,
}
SMALL = {"kv_cache_memory_bytes": 2**28}  # several test processes share a GPU
PROMPTS = [[5, 6, 7], [40], list(range(60, 300)), *([n, n + 1, 2 * n] for n in range(3, 36))]


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("gpu") / request.param, request.param, seed=3)


# mistral has a sliding window, qwen3_next keeps states
@pytest.fixture(scope="module", params=["qwen2", "mistral", "qwen3_next"])
def some_model(request, tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("gpu") / request.param, request.param, seed=3)


def run(model: Path, **arguments) -> list[tuple[list[int], list[float]]]:
    """Token ids and their log-probabilities, greedy and random requests in one batch."""
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2),
            top_p=0.9,
            top_k=40,
            seed=i,
            max_tokens=20 + i % 7,
            logprobs=1,
            ignore_eos=True,
        )
        for i in range(len(PROMPTS))
    ]
    with LLM(str(model), engine="inproc", **{**ARGUMENTS, **SMALL, **arguments}) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False
        )
    told = [output.outputs[0] for output in outputs]
    return [
        (
            one.token_ids,
            [
                position[token].logprob
                for token, position in zip(one.token_ids, one.logprobs, strict=True)
            ],
        )
        for one in told
    ]


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
@pytest.mark.parametrize("max_num_seqs", [40, 7])
def test_the_tokens_equal_the_cpus(model, enforce_eager, max_num_seqs) -> None:
    expected = run(model, device="cpu", max_num_seqs=max_num_seqs)
    found = run(model, device="cuda", enforce_eager=enforce_eager, max_num_seqs=max_num_seqs)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


def test_memory_stays_within_the_limit_and_is_released(some_model) -> None:
    """Of this process alone: others may use the GPU, too."""
    before = torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.3
    with LLM(
        str(some_model),
        engine="inproc",
        device="cuda",
        gpu_memory_utilization=share,
        **{**ARGUMENTS, "max_num_seqs": 4096},
    ) as llm:
        llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            SamplingParams(max_tokens=20),
            use_tqdm=False,
        )
        taken = torch.cuda.memory_reserved() - before
        assert 2**29 < taken <= (0.3 + 0.02) * total
    # what is left are the workspaces of libraries
    assert torch.cuda.memory_reserved() - before < 2**28


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="this GPU has no fp8",
)
def test_a_cache_in_fp8(some_model) -> None:
    """The same tokens with and without graphs, in whole prompts and in chunks next to decodes.
    Nearly all equal the CPU reference's; a key's rounding to fp8 may depend on its last bit.
    """
    eager = run(some_model, device="cuda", kv_cache_dtype="fp8", enforce_eager=True)
    assert [tokens for tokens, _ in run(some_model, device="cuda", kv_cache_dtype="fp8")] == [
        tokens for tokens, _ in eager
    ]
    slow = {"reshape_and_cache": "reference", "paged_attention": "reference"}
    expected = run(some_model, device="cpu", kv_cache_dtype="fp8", kernels=slow)
    same = [mine == theirs for (mine, _), (theirs, _) in zip(eager, expected, strict=True)]
    assert sum(same) > 0.7 * len(same)


@pytest.mark.parametrize("method", SPECULATION)
def test_drafts_change_no_token(method: str) -> None:
    expected, _ = generate("cpu")
    found, counters = generate("cuda", speculative_config=SPECULATION[method] | DRAFTS)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert counters["num_accepted_tokens"] > 1


def test_a_second_engine_has_what_is_free() -> None:
    """And one for which nothing is left says so."""
    sizes = {**ARGUMENTS, "engine": "inproc", "device": "cuda"}
    free, total = torch.cuda.mem_get_info()
    used = (total - free) / total
    with LLM("bundled", gpu_memory_utilization=used + 0.1, **sizes) as first:
        with LLM("bundled", gpu_memory_utilization=used + 0.2, **sizes) as second:
            params = SamplingParams(temperature=0.0, max_tokens=8)
            answers = [llm.generate("A dog", params, use_tqdm=False) for llm in (first, second)]
            texts = [answer[0].outputs[0].text for answer in answers]
            assert texts[0] == texts[1]
        with pytest.raises(NotEnoughMemoryError):
            LLM("bundled", gpu_memory_utilization=max(0.01, used - 0.05), **sizes)
