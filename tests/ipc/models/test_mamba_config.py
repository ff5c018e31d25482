"""What config.json says of families with Mamba 2, in the spelling of published files and in that
of transformers 5.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import replace
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import ARCHITECTURES
from quire.ipc.models.decoder_config import DecoderConfig, LayerConfig, unread_keys
from quire.ipc.models.draft_heads import head_config, head_shapes
from quire.ipc.models.mamba_config import (
    FALCON_FORMAT,
    MAMBA2_FORMAT,
    MAMBA_FORMAT,
    NEMOTRON_FORMAT,
    Mamba2Config,
)
from quire.ipc.models.state_layout import StatePart
from quire.tests.tiny_models import make_tiny_config

FAMILIES = {
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "bamba": "BambaForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
}


def keys_of(kind: str, **change: Any) -> dict[str, Any]:
    """config.json as transformers writes it, with changes."""
    return {**make_tiny_config(kind).to_dict(), **change}


def parse(kind: str, **change: Any) -> DecoderConfig:
    return ARCHITECTURES[FAMILIES[kind]].parse(keys_of(kind, **change))


def kinds_of(config: DecoderConfig) -> str:
    """A letter for each layer: Mixer, Attention, mLp."""
    return " ".join(
        "M" * (layer.mixer is not None) + "A" * layer.has_attention + "L" * layer.has_mlp
        for layer in config.layers
    )


def test_the_blocks_of_each_familys_layers() -> None:
    assert kinds_of(parse("granitemoehybrid")) == "ML AL ML"
    assert kinds_of(parse("bamba")) == "ML AL ML"
    assert kinds_of(parse("falcon_h1")) == "MAL MAL MAL"
    nemotron = parse("nemotron_h")
    assert kinds_of(nemotron) == "M L A L M" and nemotron.num_hidden_layers == 5
    assert nemotron.experts is not None and nemotron.experts.dense_layers == (0, 2, 3, 4)
    mamba = parse("mamba2")
    assert kinds_of(mamba) == "M M M" and mamba.cache_layers == ()


def test_published_files_and_those_of_transformers_mean_the_same() -> None:
    published = ["mamba", "attention", "mamba"]
    granite = parse("granitemoehybrid")
    assert parse("granitemoehybrid", layer_types=published) == granite
    renamed = {"layer_types": None, "layers_block_type": published}
    assert parse("granitemoehybrid", **renamed) == granite
    assert parse("granitemoehybrid", position_embedding_type="nope") == granite
    assert parse("granitemoehybrid", time_step_limit=[0.0, {"__float__": "Infinity"}]) == granite
    nemotron, listed = parse("nemotron_h"), ["mamba", "moe", "attention", "mlp", "mamba"]
    assert parse("nemotron_h", layers_block_type=listed) == nemotron
    as_letters = {"hybrid_override_pattern": "ME*-M", "num_hidden_layers": 5}
    assert parse("nemotron_h", layers_block_type=None, **as_letters) == nemotron


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({"mtp_layers_block_type": None}, "A L"),
        ({"mtp_layers_block_type": ["attention", "moe", "mlp"]}, "A L L"),
        ({"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "E*"}, "L A"),
        ({"mtp_layers_block_type": ["mamba", "attention"]}, "attention and no mamba layers"),
        ({"mtp_layers_block_type": ["moe"]}, "mtp_layers_block_type must be attention and no"),
        ({"mtp_layers_block_type": "*E"}, "mtp_layers_block_type must be a list"),
        (
            {"mtp_layers_block_type": None, "mtp_hybrid_override_pattern": "*X"},
            "mtp_hybrid_override_pattern must be letters",
        ),
    ],
)
def test_the_layers_of_a_head_that_drafts(change: dict[str, Any], kinds: str) -> None:
    row, keys = ARCHITECTURES[FAMILIES["nemotron_h"]], keys_of("nemotron_h", **change)
    if "must" in kinds or "no mamba" in kinds:
        with pytest.raises(ModelLoadError, match=kinds):
            head_config(row, keys)
        return
    head = head_config(row, keys)
    assert kinds_of(head) == kinds and head.rope_of(kinds.split().index("A")) is None
    assert head.experts is not None
    assert "layers.1.mixer.experts.0.up_proj.weight" in head_shapes(row, head) or kinds == "L A"


def test_attention_rotates_as_the_family_says() -> None:
    granite = parse("granitemoehybrid")
    assert granite.rope_of(1) is None and granite.attention_scale == 0.2
    assert parse("granitemoehybrid", position_embedding_type="rope").rope_of(1) is not None
    assert parse("nemotron_h").rope_of(2) is None
    rope = parse("bamba").rope_of(1)
    assert rope is not None and rope["partial_rotary_factor"] == 0.5
    rope = parse("bamba", rope_parameters=None, rope_theta=500.0).rope_of(1)
    assert rope is not None and (rope["partial_rotary_factor"], rope["rope_theta"]) == (0.5, 500.0)


def test_granite_without_experts_has_the_shared_mlp_alone() -> None:
    config = parse("granitemoehybrid", num_local_experts=0)
    assert config.experts is None and config.intermediate_size == 80
    row = ARCHITECTURES[FAMILIES["granitemoehybrid"]]
    shapes = row.weight_shapes(config)
    assert shapes["model.layers.0.shared_mlp.input_linear.weight"] == [160, 64]
    assert not any("block_sparse_moe" in name for name in shapes)


def test_nemotron_without_layers_of_experts() -> None:
    config = parse("nemotron_h", layers_block_type=["mamba", "mlp"], n_routed_experts=None)
    assert config.experts is None and kinds_of(config) == "M L"


def test_factors_of_falcon() -> None:
    config = parse("falcon_h1", attention_in_multiplier=1.1)
    assert config.attention_scale == pytest.approx(24**-0.5 * 0.7 * 1.1**2)
    assert config.attention_out_scale == pytest.approx(1.1 * 0.9)
    assert (config.embedding_scale, config.logits_scale) == (2.0, 0.8)
    assert config.mlp_scales == (0.9, 0.8)
    mixer = config.layers[0].mixer
    assert isinstance(mixer, Mamba2Config) and mixer.out_scale == 0.7
    assert mixer.part_scales == pytest.approx([1.2 * s for s in (0.6, 0.7, 0.8, 0.9, 1.1)])


def test_the_mixers_of_each_family() -> None:
    plain = Mamba2Config(8, 16, 8, 2, 4, eps=1e-6)
    assert parse("granitemoehybrid").layers[0] == LayerConfig(plain, has_attention=False)
    granite = MAMBA_FORMAT.parse(keys_of("granitemoehybrid", mamba_d_head="auto"))
    assert granite == plain  # mamba_expand * hidden_size / mamba_n_heads
    falcon = FALCON_FORMAT.parse(keys_of("falcon_h1", mamba_d_head="auto"))
    assert falcon.head_dim == 16 and not falcon.has_norm
    falcon = FALCON_FORMAT.parse(keys_of("falcon_h1", mamba_rms_norm=True))
    assert falcon.has_norm and not falcon.gate_first
    nemotron = NEMOTRON_FORMAT.parse(keys_of("nemotron_h"))
    assert nemotron == replace(plain, num_heads=6, eps=1e-5)
    mamba = MAMBA2_FORMAT.parse(keys_of("mamba2", use_bias=True))
    assert mamba == replace(plain, eps=1e-5, has_in_bias=True, has_out_bias=True)
    assert plain.state_parts == (StatePart((3, 160), False), StatePart((8, 16, 8), True))
    assert plain.linear_shapes(64) == [(128 + 160 + 8, 64), (64, 128)]


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_key_is_known(kind: str) -> None:
    """Those that transformers writes, and those that only published files have."""
    published = {
        "granitemoehybrid": {"init_method": "mup", "normalization_function": "rmsnorm"},
        "falcon_h1": {"mamba_use_mlp": True, "mlp_expansion_factor": 8},
        "nemotron_h": {"norm_eps": 1e-5, "hybrid_override_pattern": "ME*-M"},
        "mamba2": {"norm_before_gate": True, "rms_norm": True, "time_step_scale": 1.0},
    }
    keys = keys_of(kind, **published.get(kind, {}))
    assert unread_keys(keys) == [] and ARCHITECTURES[FAMILIES[kind]].parse(keys) == parse(kind)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("granitemoehybrid", {"layer_types": ["mamba", "moe"]}, "layer_types must be a list of ma"),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba"]},
            "layer_types has 1 entries for num_hidden_layers=3",
        ),
        ("granitemoehybrid", {"layer_types": None}, "lacks layer_types"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type must"),
        (
            "granitemoehybrid",
            {"mamba_n_groups": 3},
            "mamba_n_heads=8 is not a multiple of mamba_n_",
        ),
        ("granitemoehybrid", {"mamba_d_conv": 1}, "mamba_d_conv must be an integer from 2 to 64"),
        ("granitemoehybrid", {"mamba_d_state": None}, "lacks mamba_d_state"),
        ("granitemoehybrid", {"mamba_d_head": "auto", "mamba_expand": -1}, "mamba_expand must be"),
        ("granitemoehybrid", {"time_step_limit": [0.1, math.inf]}, "time_step_limit must be"),
        ("granitemoehybrid", {"mamba_conv_bias": 3}, "mamba_conv_bias must be true or false"),
        ("bamba", {"attn_layer_indices": ["1"]}, "attn_layer_indices must be a list of layers"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "5 numbers, of z, x, B, C, dt"),
        ("falcon_h1", {"mlp_multipliers": [1.0, 0.0]}, "mlp_multipliers must be a number from"),
        ("falcon_h1", {"mamba_proj_bias": True}, "ssm_in_multiplier=1.2 is not supported beside"),
        (
            "falcon_h1",
            {"attention_bias": True, "attention_in_multiplier": 1.1},
            "attention_in_multiplier=1.1 is not supported beside attention_bias",
        ),
        ("nemotron_h", {"layers_block_type": None}, "lacks layers_block_type"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "MX"},
            "hybrid_override_pattern must be letters of M, \\*, -, E",
        ),
        ("nemotron_h", {"num_hidden_layers": 7}, "has 5 entries for num_hidden_layers=7"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act must be 'silu'"),
        ("nemotron_h", {"mlp_hidden_act": "gelu"}, "mlp_hidden_act='gelu' is not supported"),
        ("mamba2", {"layer_norm_epsilon": 2}, "must be a number from 0 to 1"),
        ("mamba2", {"state_size": 0}, "state_size must be an integer from 1"),
    ],
    ids=str,
)
def test_mistakes_are_named(kind: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        parse(kind, **change)
