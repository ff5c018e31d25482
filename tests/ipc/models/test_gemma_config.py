"""What config.json says of Gemma 4's layers, in both spellings, and what is refused."""

from __future__ import annotations

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import ARCHITECTURES, text_part
from quire.ipc.models.decoder_config import LayerConfig, PerLayerInputs

ROW = ARCHITECTURES["Gemma4ForCausalLM"]
SLIDING, FULL = "sliding_attention", "full_attention"
PUBLISHED = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "sliding_window": 24,
    "max_position_embeddings": 512,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}
EQUAL = PUBLISHED | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}


def test_both_spellings_of_sizes_by_layer_mean_the_same():
    saved = {key: value for key, value in EQUAL.items() if "global" not in key}
    own = {"head_dim": 32, "num_key_value_heads": 1}
    saved["per_layer_config"] = {"2": own, "5": own}
    config = ROW.parse(EQUAL)
    assert config == ROW.parse(saved)
    assert config.layer(2) == LayerConfig(
        head_dim=32, num_kv_heads=1, has_values=False, intermediate_size=96
    )
    assert config.layer(0) == LayerConfig(head_dim=16, num_kv_heads=2, intermediate_size=96)
    assert config.attention_scale == 1 and config.logits_cap == 30
    # without k = v, the full layers have as many heads as the others
    assert ROW.parse(PUBLISHED | {"num_global_key_value_heads": 1}).layer(2).num_kv_heads == 2


def test_layers_that_share_keys_and_values_read_those_of_the_last_owner_of_their_type():
    config = ROW.parse(
        PUBLISHED
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8}
    )
    assert [layer.kv_from for layer in config.layers] == [None] * 4 + [3, 2]
    assert [layer.intermediate_size for layer in config.layers] == [96] * 4 + [192] * 2
    assert config.cache_layers == (0, 1, 2, 3) and config.cache_windows == (24, 24, 0, 24)
    assert config.per_layer_inputs == PerLayerInputs(8, 320)


def test_the_rope_of_full_layers_is_proportional_where_none_is_given():
    config = ROW.parse(PUBLISHED | {"layer_types": None})
    assert config.sliding_windows == (24,) * 5 + (0,)  # every sixth layer is full, and the last
    assert config.rope == {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
    }
    assert config.sliding_rope == {"rope_type": "default", "rope_theta": 1e4}


def test_the_text_part_of_a_multimodal_model():
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": PUBLISHED}
    config = ARCHITECTURES["Gemma4ForConditionalGeneration"].parse(text_part(whole))
    assert config.name_prefix == "language_model."
    unified = {"architectures": ["Gemma4UnifiedForConditionalGeneration"]}
    text = PUBLISHED | {
        "model_type": "gemma4_unified_text",
        "use_bidirectional_attention": "vision",
    }
    del text["hidden_size_per_layer_input"]
    row = ARCHITECTURES["Gemma4UnifiedForConditionalGeneration"]
    assert row.parse(text_part(unified | {"text_config": text})).per_layer_inputs is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supp"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers=5 leaves no layer of the type full"),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers must be an integer from 1 to 5"),
        ({"per_layer_config": {"2": {"num_attention_heads": 1}}}, "per_layer_config must be"),
        ({"per_layer_config": {"9": {"head_dim": 32}}}, "per_layer_config must be"),
        ({"layer_types": [FULL]}, "layer_types must be a list of 6 entries"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300},
            "vocab_size_per_layer_input must be an integer from 320",
        ),
        ({"enable_moe_block": True}, "config.json lacks num_experts"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ModelLoadError, match=message):
        ROW.parse(PUBLISHED | change)
