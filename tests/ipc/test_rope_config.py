"""Rotary position embeddings in config.json: accepted and refused values, and the maximum sequence
length.
"""

from __future__ import annotations

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.rope_config import model_context, parse_rope_parameters

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
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope type 'longrope' is not supported; supported: default, linear",
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
