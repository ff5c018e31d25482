"""What config.json says of Kimi Linear, in the spelling of published files and in that of
transformers 5.
"""

from __future__ import annotations

from typing import Any

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import ARCHITECTURES
from quire.ipc.models.decoder_config import DecoderConfig, unread_keys
from quire.ipc.models.mixers import KimiDeltaConfig
from quire.ipc.models.rope_config import model_context
from quire.ipc.models.state_layout import StatePart
from quire.tests.tiny_models import make_tiny_config

PUBLISHED: dict[str, Any] = {  # of Kimi-Linear-48B-A3B
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def parse(keys: dict[str, Any]) -> DecoderConfig:
    return ARCHITECTURES["KimiLinearForCausalLM"].parse(keys)


def test_the_published_keys() -> None:
    config = parse(PUBLISHED)
    full = [index for index, layer in enumerate(config.layers) if layer.mixer is None]
    assert full == [3, 7, 11, 15, 19, 23, 26] == list(config.cache_layers)
    assert config.layers[0].mixer == KimiDeltaConfig(32, 128, 4, 1e-5)
    state = StatePart((3, 3 * 4096), False), StatePart((32, 128, 128), True)
    assert config.state_parts == (state,) * 20
    assert config.latent is not None and config.head_dim == 576 and config.num_key_value_heads == 1
    assert config.attention_scale == 192**-0.5 and config.rope_of(3) is None
    experts = config.experts
    assert experts is not None and experts.dense_layers == (0,)
    assert (experts.count, experts.per_token, experts.shared_size) == (256, 8, 1024)
    assert experts.renormalizes and experts.scale == 2.446
    assert config.max_position_embeddings == model_context(PUBLISHED) == 1048576
    assert unread_keys(PUBLISHED) == []


def test_the_keys_of_transformers() -> None:
    keys = make_tiny_config("kimi_linear").to_dict()
    config = parse(keys)
    assert [layer.mixer is None for layer in config.layers] == [False, False, True, False]
    assert config.layers[0].mixer == KimiDeltaConfig(6, 16, 4, 1e-5)
    assert config.experts is not None and config.experts.num_groups == 4
    assert unread_keys(keys) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mla_use_nope": False}, "mla_use_nope must be True, got False"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func must be 'sigmoid'"),
        ({"linear_attn_config": []}, "linear_attn_config must be an object"),
        ({"linear_attn_config": None}, "full_attn_layers must be a list of layers"),
        ({"num_hidden_layers": 28}, "lists layer 28 neither in full_attn_layers nor in kda_layers"),
        (
            {"linear_attn_config": PUBLISHED["linear_attn_config"] | {"head_dim": 0}},
            "linear_attn_config.head_dim must be",
        ),
        ({"layer_types": ["sliding_attention"] * 27}, "layer_types must be a list of"),
    ],
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        parse(PUBLISHED | change)
