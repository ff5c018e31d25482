"""Rotary position embeddings in config.json: accepted and refused values, and the maximum sequence
length.
"""

from __future__ import annotations

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.rope_config import (
    model_context,
    parse_rope_parameters,
    parse_ropes,
    rotary_dim,
)

BASE = {"max_position_embeddings": 4096, "hidden_size": 256, "num_attention_heads": 4}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}


def test_absent_parameters_mean_the_default():
    assert parse_rope_parameters({"rope_scaling": None, "rope_theta": None}) == {
        "rope_type": "default",
        "rope_theta": 10000.0,
    }


def test_original_length_next_to_the_parameters_has_precedence():
    hf_config = {
        **BASE,
        "original_max_position_embeddings": 700,
        "rope_parameters": YARN,
    }
    assert parse_rope_parameters(hf_config)["original_max_position_embeddings"] == 700


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "axial", "factor": 2.0}},
            "rope type 'axial' is not supported; supported: default, linear",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope type 'longrope' lacks long_factor, short_factor",
        ),
        (
            {"rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": 1.0}},
            "rope parameter short_factor must be a list of numbers",
        ),
        (
            {
                "original_max_position_embeddings": 1,
                "rope_scaling": {"type": "su", "long_factor": [1.0], "short_factor": [1.0]},
            },
            "original_max_position_embeddings must be more than 1 for longrope",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "does not know full_attention",
        ),
        ({"rope_scaling": {"type": "linear"}}, "'linear' lacks factor"),
        (
            {"rope_scaling": {"rope_type": "factors", "factors": 2.0}},
            "rope parameter factors must be a list of numbers",
        ),
        (
            {"rope_scaling": {"rope_type": "factors", "factors": [1.0, 0.0]}},
            "rope parameter factors must be positive and finite, got 0.0",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "'llama3' lacks high_freq_factor, low_freq_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "short_factor": [1.0]}},
            "does not know short_factor",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 4]}},
            "does not know mrope_section",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": "2"}},
            "rope parameter factor must be a number, got '2'",
        ),
        ({"rope_theta": [1]}, r"rope parameter rope_theta must be a number, got \[1\]"),
        ({"rope_scaling": "linear"}, "rope parameters must be an object, got 'linear'"),
        (
            {"rope_scaling": {"rope_type": ["linear"]}},
            r"rope type must be a string, got \['linear'\]",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be positive and finite"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor must be positive"),
        ({"rope_theta": float("nan")}, "rope_theta must be positive and finite, got nan"),
        ({"rope_theta": 1.0}, "rope_theta must be more than 1, got 1.0"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "low_freq_factor must be less than high_freq_factor",
        ),
        (
            {
                "original_max_position_embeddings": "4096",
                "rope_scaling": {"type": "yarn", "factor": 2},
            },
            "original_max_position_embeddings must be a number, got '4096'",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
    ],
)
def test_unsupported_values_are_refused(hf_config, message):
    with pytest.raises(ModelLoadError, match=message):
        parse_rope_parameters({**BASE, **hf_config})


@pytest.mark.parametrize(
    ("hf_config", "context"),
    [
        ({}, None),
        ({"max_position_embeddings": 100, "max_seq_len": 50}, 50),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        (
            {
                "max_position_embeddings": 100,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            100,
        ),
        (
            {
                "max_position_embeddings": 100,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            100,
        ),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "dynamic", "factor": 4}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 400),
        ({"max_position_embeddings": 400, "rope_parameters": YARN}, 400),
        ({"max_position_embeddings": 400, "index_topk": 64}, 64),
        ({"max_position_embeddings": 400, "rope_parameters": YARN, "index_topk": 900}, 400),
        ({"index_topk": 64}, 64),
        ({"max_position_embeddings": 100, "model_max_length": 50}, 50),
    ],
)
def test_model_context(hf_config, context) -> None:
    assert model_context(hf_config) == context


@pytest.mark.parametrize(
    ("hf_config", "message"),
    [
        ({"max_position_embeddings": "100"}, "max_position_embeddings must be a positive integer"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be a positive integer"),
        ({"max_position_embeddings": True}, "max_position_embeddings must be a positive integer"),
        ({"n_positions": 8, "rope_scaling": "yarn"}, "must be an object, got 'yarn'"),
        (
            {"n_positions": 8, "rope_scaling": {"type": "yarn", "factor": float("inf")}},
            "factor must be positive and finite, got inf",
        ),
    ],
)
def test_an_invalid_context_is_refused(hf_config, message) -> None:
    with pytest.raises(ModelLoadError, match=message):
        model_context(hf_config)


PARTIAL, BY_KIND = ("partial_rotary_factor",), ("layer_types",)


def test_a_part_of_a_head_may_rotate():
    for hf_config in (
        {"partial_rotary_factor": 0.75},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
    ):
        rope, sliding = parse_ropes({**BASE, **hf_config}, 128, PARTIAL)
        assert rotary_dim(rope, 128) == 96 and sliding is None
    assert rotary_dim(parse_rope_parameters(BASE), 128) == 128


def test_layers_with_a_window_have_parameters_of_their_own():
    """They are given in one of two forms."""
    linear = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": linear}
    new = {
        "rope_parameters": {
            "full_attention": {**linear, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    expected = {**linear, "rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e4}
    for hf_config in (old, new):
        assert parse_ropes({**BASE, **hf_config}, 64, BY_KIND) == expected
        assert model_context({**BASE, **hf_config}) == 4096  # which includes the scaling


@pytest.mark.parametrize(
    ("override", "honours", "message"),
    [
        ({"partial_rotary_factor": 1.5}, PARTIAL, "must be a number from 0 to 1, got 1.5"),
        ({"partial_rotary_factor": "a"}, PARTIAL, "must be a number from 0 to 1, got 'a'"),
        ({"partial_rotary_factor": 0.02}, PARTIAL, "rotates 1 of a head's 64 features"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
            (),
            "rope parameter long_factor needs 32 numbers, one for each frequency",
        ),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "wobbly"}}},
            BY_KIND,
            "rope type 'wobbly' is not supported",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}},
            (),
            "does not know llama_4_scaling_beta",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "llama_4_scaling_beta": "a"}},
            ("llama_4_scaling_beta",),
            "llama_4_scaling_beta must be a number, got 'a'",
        ),
    ],
)
def test_invalid_ropes_of_layers_are_refused(override, honours, message):
    with pytest.raises(ModelLoadError, match=message):
        parse_ropes({**BASE, **override}, 64, honours)
