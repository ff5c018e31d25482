"""config.json: which keys are read, refused or logged."""

from __future__ import annotations

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.decoder_config import MOST, parse_decoder_config, unread_keys
from quire.tests.tiny_models import KINDS, make_tiny_config

MINIMAL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def test_defaults_equal_those_of_transformers():
    config = parse_decoder_config(MINIMAL)
    assert (config.num_key_value_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert config.rope == {"rope_type": "default", "rope_theta": 10000.0}
    assert parse_decoder_config(MINIMAL, default_head_dim=128).head_dim == 128
    assert parse_decoder_config({**MINIMAL, "head_dim": 24}, default_head_dim=128).head_dim == 24


@pytest.mark.parametrize("kind", KINDS)
def test_all_keys_that_transformers_writes_are_known(kind):
    assert unread_keys(make_tiny_config(kind).to_dict()) == []


@pytest.mark.parametrize("key", MINIMAL)
def test_a_missing_key_is_named(key):
    with pytest.raises(ModelLoadError, match=f"lacks {key}"):
        parse_decoder_config({name: value for name, value in MINIMAL.items() if name != key})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
        ({"use_sliding_window": True, "sliding_window": 512}, "use_sliding_window=True"),
        (
            {"sliding_window": 512},
            "sliding_window=512 is not supported unless use_sliding_window is false",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types of sliding_attention are not supported; supported: full_attention",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"residual_multiplier": 0.2}, "residual_multiplier=0.2 is not supported; supported: 1.0"),
        ({"num_experts": 8}, "num_experts=8"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads=4 is not a multiple of num_key_value_heads=3",
        ),
        ({"head_dim": 15}, "head_dim must be even"),
        (
            {"head_dim": 16, "rope_scaling": {"rope_type": "factors", "factors": [1.0] * 9}},
            "rope parameter factors needs 8 numbers",
        ),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"vocab_size": -1}, "vocab_size must be a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1,024, got 1000000000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps must be a number from 0 to 1, got '1e-6'"),
    ],
)
def test_keys_that_change_the_computation_are_refused(override, message):
    with pytest.raises(ModelLoadError, match=message):
        parse_decoder_config({**MINIMAL, "head_dim": 16, **override})


def test_neutral_values_and_supported_keys_are_accepted():
    neutral = {
        "residual_multiplier": 1.0,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "quantization_config": None,
        "hidden_act": "silu",
    }
    assert parse_decoder_config(
        {**MINIMAL, **neutral, "mlp_bias": True}, honours=("mlp_bias",)
    ).mlp_bias


def test_only_unread_keys_that_could_change_results_are_logged():
    harmless = {
        "_model_name_or_path": "x",
        "unk_token_id": 0,
        "embd_dropout": 0.1,
        "max_seq_len": 2048,
        "top_k": 50,
    }
    assert unread_keys({**MINIMAL, **harmless}) == []
    assert unread_keys({**MINIMAL, **harmless, "wobble": 3, "attention_clip": 8}) == [
        "attention_clip",
        "wobble",
    ]


WEIRD = [0, -1, True, 0.5, 10**9, 10**30, float("nan"), float("inf"), "4", [], [1], {}, {"a": {}}]
KEYS = [
    *MINIMAL,
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "quantization_config",
    "use_sliding_window",
    "sliding_window",
    "max_window_layers",
    "layer_types",
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "hidden_activation",
    "sliding_window_pattern",
    "no_rope_layers",
    "no_rope_layer_interval",
    "rope_local_base_freq",
    "query_pre_attn_scalar",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
]
GEMMA, SMOLLM = ("layer_types", "query_pre_attn_scalar"), ("use_sliding_window", "no_rope_layers")
GRANITE = (
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
    "partial_rotary_factor",
)
FILLED = {"sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
GEMMA_9 = {**FILLED, "sliding_window": 9}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "honours", [(), ("use_sliding_window",), ("sliding_window",), GEMMA, SMOLLM, GRANITE]
)
def test_a_value_of_any_type_is_read_or_refused(key, honours):
    """The parser raises no other exception. Accepted values are finite and of the right type."""
    for value in WEIRD:
        for base in (MINIMAL, {**MINIMAL, "use_sliding_window": True, "sliding_window": 9}):
            hf_config = {**base, **FILLED, "rope_scaling": {"type": "yarn", "factor": 2.0}}
            hf_config[key] = value
            try:
                config = parse_decoder_config(hf_config, honours=honours)
            except ModelLoadError as error:
                assert "\n" not in str(error) and len(str(error)) < 300
            else:
                assert 1 <= config.num_hidden_layers <= MOST["num_hidden_layers"]
                assert len(config.sliding_windows) == config.num_hidden_layers
                assert all(type(window) is int for window in config.sliding_windows)
                assert config.head_dim > 0 and 0 <= config.rms_norm_eps < 1


QWEN, MISTRAL = ("use_sliding_window",), ("sliding_window",)
ON = {"use_sliding_window": True, "sliding_window": 9}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("honours", "override", "windows"),
    [
        (QWEN, {}, (0, 0)),
        (QWEN, {"sliding_window": 9}, (0, 0)),  # the switch is off by default
        (QWEN, ON, (0, 0)),  # max_window_layers is 28 by default
        (QWEN, {**ON, "max_window_layers": 1}, (0, 9)),
        (QWEN, {**ON, "max_window_layers": 0}, (9, 9)),
        (QWEN, {**ON, "layer_types": [SLIDING, FULL]}, (9, 0)),
        (QWEN, {"use_sliding_window": True, "sliding_window": None}, (0, 0)),
        (QWEN, {"sliding_window": 9, "layer_types": [FULL, FULL]}, (0, 0)),
        # fewer layers than in the file, set by hf_overrides
        (QWEN, {"layer_types": [FULL] * 3}, (0, 0)),
        (MISTRAL, {"sliding_window": 9}, (9, 9)),
        (MISTRAL, {"sliding_window": None}, (0, 0)),
        (GEMMA, {**FILLED, "sliding_window": 9}, (9, 0)),
        (GEMMA, {**FILLED, "sliding_window": 9, "layer_types": [FULL, SLIDING]}, (0, 9)),
        (SMOLLM, {**ON, "no_rope_layers": [1, 0]}, (0, 9)),
        (SMOLLM, {"sliding_window": 9, "no_rope_layers": [1, 0]}, (0, 0)),
        ((), {**ON, "use_sliding_window": False}, (0, 0)),
    ],
)
def test_windows_of_the_layers(honours, override, windows):
    assert parse_decoder_config({**MINIMAL, **override}, honours=honours).sliding_windows == windows


def test_layers_that_do_not_rotate():
    def unrotated(**override):
        hf_config = {**MINIMAL, "num_hidden_layers": 5, **override}
        return parse_decoder_config(hf_config, honours=SMOLLM).unrotated_layers

    assert unrotated() == (3,) and unrotated(no_rope_layer_interval=2) == (1, 3)
    assert unrotated(no_rope_layers=[0, 1, 1, 1, 0, 1]) == (0, 4)
    assert parse_decoder_config(MINIMAL).unrotated_layers == ()


def test_factors():
    hf_config = {
        **MINIMAL,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.25,
        "attention_multiplier": 0.5,
        "logits_scaling": 8.0,
    }
    config = parse_decoder_config(hf_config, honours=GRANITE)
    assert (config.embedding_scale, config.residual_scale) == (12, 0.25)
    assert (config.attention_scale, config.logits_scale) == (0.5, 0.125)
    plain = parse_decoder_config(MINIMAL)
    assert plain.attention_scale == 16**-0.5
    assert plain.embedding_scale == plain.residual_scale == plain.logits_scale == 1.0
    assert parse_decoder_config({**MINIMAL, **GEMMA_9}, honours=GEMMA).attention_scale == 0.25


@pytest.mark.parametrize(
    ("honours", "override", "message"),
    [
        (GRANITE, {"logits_scaling": 0}, "logits_scaling must be a number from 1e-06 to"),
        (GRANITE, {"residual_multiplier": True}, "residual_multiplier must be a number"),
        (GEMMA, {**GEMMA_9, "query_pre_attn_scalar": -1}, "query_pre_attn_scalar must be a number"),
        (GEMMA, {**FILLED, "sliding_window_pattern": 0}, "must be a positive integer, got 0"),
        (SMOLLM, {"no_rope_layers": [1]}, "one for each of 2 layers, got \\[1\\]"),
        (SMOLLM, {"no_rope_layers": [1, 2]}, "no_rope_layers must be a list of 0 and 1"),
        ((), {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported; supp"),
    ],
)
def test_invalid_factors_and_layers_are_refused(honours, override, message):
    with pytest.raises(ModelLoadError, match=message):
        parse_decoder_config({**MINIMAL, **override}, honours=honours)


def test_the_activation_is_the_models():
    for key in ("hidden_act", "hidden_activation"):
        hf_config = {**MINIMAL, key: "gelu_pytorch_tanh"}
        assert parse_decoder_config(hf_config, activation="gelu_tanh").activation == "gelu_tanh"
        with pytest.raises(ModelLoadError, match="'gelu_pytorch_tanh' is not supported"):
            parse_decoder_config(hf_config)


@pytest.mark.parametrize(
    ("honours", "override", "message"),
    [
        (QWEN, {**ON, "sliding_window": 0}, "sliding_window must be a positive integer, got 0"),
        (MISTRAL, {"sliding_window": "9"}, "sliding_window must be a positive integer, got '9'"),
        (
            QWEN,
            {**ON, "max_window_layers": -1},
            "max_window_layers must be an integer, at least 0, got -1",
        ),
        (QWEN, {**ON, "layer_types": [FULL]}, "layer_types has 1 entries for num_hidden_layers=2"),
        (
            QWEN,
            {**ON, "layer_types": [FULL, "chunked_attention"]},
            "layer_types of chunked_attention are not supported; supported: full_attention, "
            "sliding",
        ),
        (
            QWEN,
            {"layer_types": [FULL, SLIDING]},
            "layer_types of sliding_attention are not supported; supported: full_attention",
        ),
        (
            MISTRAL,
            {"sliding_window": 9, "layer_types": [FULL, FULL]},
            "layer_types beside sliding_window are not supported",
        ),
        (
            (),
            {"sliding_window": 9},
            "sliding_window=9 is not supported unless use_sliding_window is false",
        ),
    ],
)
def test_invalid_windows_are_refused(honours, override, message):
    with pytest.raises(ModelLoadError, match=message):
        parse_decoder_config({**MINIMAL, **override}, honours=honours)
