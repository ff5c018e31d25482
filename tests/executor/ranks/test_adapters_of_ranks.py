"""LoRA adapters of layers that ranks have parts of, against those of one rank.

The ranks are threads; test_multiproc_executor.py has them as processes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from quire import InvalidParameterError, LoRARequest
from quire.tests.executor.driver import Driver, Row, greedy, start_executor
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.lora_adapters import PROJECTIONS, adapted_weights, random_pairs, write_peft

LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 16}
MODULES = (
    *(*PROJECTIONS, "qkv_proj", "gate_up_proj", "lm_head", "embed_tokens"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),  # of latent attention
    *("in_proj", "out_proj", "in_proj_qkvz", "in_proj_ba"),  # of mixers
)


def write_adapters(model: Path, directory: Path) -> list[LoRARequest]:
    found = []
    for number, rank in ((1, 4), (2, 16)):
        weights = adapted_weights(model, MODULES)
        pairs = random_pairs(
            {name: one for name, one in weights.items() if ".experts." not in name},
            rank,
            number,
            size=0.1,
        )
        for name in [name for name in pairs if name.endswith("embed_tokens")]:
            a, b = pairs[name]  # of W [vocab_size, hidden_size], B A is the transposed change
            pairs[name] = b.t().contiguous(), a.t().contiguous()
        path = write_peft(directory / str(number), pairs, rank)
        found.append(LoRARequest(f"adapter-{number}", number, str(path)))
    return found


def run(executor, adapters: list[LoRARequest]) -> list[Row]:
    driver = Driver(executor)
    for adapter in adapters:
        assert executor.add_lora(adapter)
    rows = [
        driver.add(f"r{i}", prompt, greedy(logprobs=2, prompt_logprobs=1), lora_request=adapter)
        for i, (prompt, adapter) in enumerate(
            [([5, 9, 2, 7], adapters[0]), ([11, 3], None), ([4] * 30, adapters[1])]
        )
    ]
    driver.run(6, lambda row: 7)
    assert [row.error for row in rows] == [None] * 3
    return rows


def numbers(row: Row) -> list[float]:
    """The log-probabilities of sampled tokens, and those of the prompt."""
    of_prompt = [row.prompt_logprobs[i] for i in sorted(row.prompt_logprobs)]
    return [float(one[1][0]) for one in (*row.logprobs, *of_prompt)]


@pytest.mark.parametrize(
    ("kind", "size", "num_stages"),
    [
        ("qwen2", 2, 2),
        ("gemma3_text", 2, 1),  # the head is tied
        ("phi3", 2, 1),  # rows of merged projections
        pytest.param("llama", 4, 1, marks=pytest.mark.slow),
        pytest.param("gpt_oss", 2, 1, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", 2, 2, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, 1, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 2, 1, marks=pytest.mark.slow),
        pytest.param("bamba", 2, 1, marks=pytest.mark.slow),
        pytest.param("lfm2", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_tokens_of_one(tiny, tmp_path, kind, size, num_stages) -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4} if "next" in kind else {}
    options = {"disable_hybrid_kv_cache_manager": True, **LORA}
    model = tiny(kind, **sizes)
    adapters = write_adapters(model, tmp_path)
    one, several = (
        start_executor(model, **options),
        RankThreads.of(model, size, num_stages, **options),
    )
    wanted, found = run(one, adapters), run(several, adapters)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.output == theirs.output
        np.testing.assert_allclose(numbers(mine), numbers(theirs), atol=1e-4)
    several.shutdown()


def test_stages_in_bfloat16_have_the_bits_of_one_rank(tiny, tmp_path) -> None:
    model, options = tiny("qwen2"), {"dtype": "bfloat16", **LORA}
    adapters = write_adapters(model, tmp_path)
    one, stages = start_executor(model, **options), RankThreads.of(model, 1, 2, **options)
    assert [numbers(row) for row in run(stages, adapters)] == [
        numbers(row) for row in run(one, adapters)
    ]
    up_proj = adapted_weights(model)["model.layers.0.mlp.up_proj"]
    pairs = random_pairs({"model.layers.0.mlp.other_proj": up_proj})
    unknown = LoRARequest("unknown", 3, str(write_peft(tmp_path / "unknown", pairs)))
    with pytest.raises(InvalidParameterError, match="other_proj.* the model has no such module"):
        stages.ranks[0].add_lora(unknown)
    assert stages.ranks[1].add_lora(unknown)  # it has none of these layers
    stages.shutdown()
