"""What config.json says of Gemma 3n's layers, with the defaults, and what is refused."""

from __future__ import annotations

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import ARCHITECTURES, text_part
from quire.ipc.models.decoder_config import AltUp, PerLayerInputs

ROW = ARCHITECTURES["Gemma3nForCausalLM"]
SLIDING, FULL = "sliding_attention", "full_attention"
# as the published E4B, with a quarter of its layers' sizes
PUBLISHED = {
    "architectures": ["Gemma3nForCausalLM"],
    "model_type": "gemma3n_text",
    "vocab_size": 262_400,
    "hidden_size": 512,
    "intermediate_size": [4096] * 35,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "layer_types": [*[SLIDING] * 4, FULL] * 7,
    "sliding_window": 512,
    "max_position_embeddings": 32_768,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "laurel_rank": 64,
    "num_kv_shared_layers": 15,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
    "vocab_size_per_layer_input": 262_144,
}


def test_the_published_form():
    config = ROW.parse(PUBLISHED)
    assert config.altup == AltUp(num_streams=4, active=0, scales_corrected=True, laurel_rank=64)
    assert config.per_layer_inputs == PerLayerInputs(256, 262_144)
    assert [layer.sparsity for layer in config.layers] == [0.95] * 10 + [0.0] * 25
    assert config.cache_layers == tuple(range(20)) and config.first_sharing == 20
    owners = [layer.kv_from for layer in config.layers[20:]]
    assert owners == [18, 18, 18, 18, 19] * 3
    assert config.sliding_windows == (512, 512, 512, 512, 0) * 7
    assert config.attention_scale == 1 and config.logits_cap == 30
    assert config.embedding_scale == 512**0.5 and config.tie_word_embeddings
    assert config.rope == {"rope_type": "default", "rope_theta": 1e6}
    assert config.sliding_rope == {"rope_type": "default", "rope_theta": 1e4}


def test_defaults_are_transformers():
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    least = {key: PUBLISHED[key] for key in sizes}
    assert ROW.parse(least | {"intermediate_size": 4096}) == ROW.parse(PUBLISHED)
    few = ROW.parse(PUBLISHED | FEW | {"activation_sparsity_pattern": None})
    assert not any(layer.sparsity for layer in few.layers)


FEW = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 0,
    "intermediate_size": [64, 96, 64, 64],
    "layer_types": [SLIDING, FULL] * 2,
    "activation_sparsity_pattern": [0.5, 0, 0, 0],
}


def test_widths_differ_between_layers():
    config = ROW.parse(PUBLISHED | FEW | {"final_logit_softcapping": None})
    assert [config.layer(index).intermediate_size for index in range(4)] == [64, 96, 64, 64]
    assert config.intermediate_size == 96 and config.logits_cap == 0
    assert config.first_sharing == 4


def test_the_text_part_of_a_multimodal_model():
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": PUBLISHED}
    row = ARCHITECTURES["Gemma3nForConditionalGeneration"]
    assert row.parse(text_part(whole)).name_prefix == "language_model."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"altup_num_inputs": 1}, "altup_num_inputs must be an integer from 2 to 16, got 1"),
        ({"altup_num_inputs": 17}, "altup_num_inputs must be an integer from 2 to 16, got 17"),
        ({"altup_active_idx": 4}, "altup_active_idx must be an integer from 0 to 3, got 4"),
        ({"altup_correct_scale": 1}, "altup_correct_scale must be true or false, got 1"),
        ({"laurel_rank": 0}, "laurel_rank must be an integer from 1"),
        ({"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input must be an integer"),
        ({"intermediate_size": [64]}, "intermediate_size must be an integer, or a list of 4"),
        ({"intermediate_size": [64, 64, 64, "64"]}, "intermediate_size must be an integer from"),
        ({"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern must be a list of 4"),
        (
            {"activation_sparsity_pattern": [0.5, 1.0, 0, 0]},
            "activation_sparsity_pattern must have numbers from 0 to below 1, got 1.0",
        ),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers=3 leaves no layer of the type full"),
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers must be an integer from 1 to 3"),
    ],
)
def test_what_is_refused(change, message):
    with pytest.raises(ModelLoadError, match=message):
        ROW.parse(PUBLISHED | FEW | change)
