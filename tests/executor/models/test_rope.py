"""The rope tables against transformers' ROPE_INIT_FUNCTIONS, in both forms of config."""

from __future__ import annotations

import math

import pytest
import torch
from quire.executor.models.rope import inverse_frequencies, make_cos_sin_cache, query_scales
from quire.ipc.models.rope_config import parse_rope_parameters

BASE = {"max_position_embeddings": 4096, "hidden_size": 256, "num_attention_heads": 4}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "llama3-no-original": {
        key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 64,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-mscale": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.8, "mscale_all_dim": 1.1},
    "yarn-attention-factor": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.9},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "short_factor": [1.0 + 0.1 * i for i in range(32)],
        "long_factor": [2.0 + 0.3 * i for i in range(32)],
    },
    "yarn-one-dimension": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 1.0},
}


def expected_tables(hf_config: dict) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**hf_config)
    rope_type = config.rope_parameters["rope_type"]
    return ROPE_INIT_FUNCTIONS.get(rope_type, LlamaRotaryEmbedding.compute_default_rope_parameters)(
        config
    )


@pytest.mark.parametrize("form", ["old", "old-type", "new"])
@pytest.mark.parametrize("name", SCALINGS)
def test_equals_transformers(name, form):
    scaling = dict(SCALINGS[name])
    if form == "new":
        hf_config = {**BASE, "rope_parameters": {**scaling, "rope_theta": 50000.0}}
    else:
        if form == "old-type":
            scaling["type"] = scaling.pop("rope_type")
        hf_config = {**BASE, "rope_theta": 50000.0, "rope_scaling": scaling}
    expected, expected_factor = expected_tables(
        {
            **hf_config,
            **{key: dict(value) for key, value in hf_config.items() if isinstance(value, dict)},
        }
    )
    inv_freq, factor = inverse_frequencies(parse_rope_parameters(hf_config), head_dim=64)
    assert torch.equal(inv_freq, expected)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_the_cache_holds_cosines_then_sines():
    rope = parse_rope_parameters({**BASE, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}})
    inv_freq, factor = inverse_frequencies(rope, 8)
    cache = make_cos_sin_cache(rope, 8, num_positions=5)
    assert cache.dtype == torch.float32 and cache.shape == (5, 8) and factor > 1
    for position in range(5):
        angles = position * inv_freq
        torch.testing.assert_close(
            cache[position], torch.cat((angles.cos(), angles.sin())) * factor
        )


def test_factors_divide_frequencies():
    rope = {"rope_type": "factors", "rope_theta": 100.0, "factors": [1.0, 4.0]}
    inv_freq, factor = inverse_frequencies(rope, 4)
    assert factor == 1.0 and torch.allclose(inv_freq, torch.tensor([1.0, 0.025]))


def test_longrope_chooses_factors_by_the_longest_sequence():
    rope = parse_rope_parameters(
        {
            "max_position_embeddings": 64,
            "rope_theta": 100.0,
            "original_max_position_embeddings": 16,
            "rope_scaling": {"type": "su", "short_factor": [1.0, 2.0], "long_factor": [4.0, 5.0]},
        }
    )
    frequencies = torch.tensor([1.0, 0.1])
    for num_positions, factors in ((16, [1.0, 2.0]), (17, [4.0, 5.0])):
        inv_freq, factor = inverse_frequencies(rope, 4, num_positions)
        torch.testing.assert_close(inv_freq, frequencies / torch.tensor(factors))
        assert factor == pytest.approx((1 + math.log(4) / math.log(16)) ** 0.5)


def test_queries_grow_beyond_the_original_length():
    rope = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 4}
    assert query_scales(rope, 4) is None and query_scales({}, 100) is None
    scales = query_scales(rope, 10)
    assert scales is not None and scales[:4].tolist() == [1.0] * 4
    torch.testing.assert_close(scales[[4, 9]], 1 + 0.5 * torch.tensor([2.0, 3.0]).log())
