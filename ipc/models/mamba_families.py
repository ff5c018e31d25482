"""What config.json says of the families with mixers of Mamba 2 beside what all decoders have: which
layers have mixers, attention and an MLP, and factors.

Must not know: tensors, layers, how any of it is computed.

Granite 4 H, Falcon-H1, Bamba, Nemotron-H with Nemotron 3, and Mamba 2 itself. Published files and
those that transformers 5 writes name the kinds of layers differently.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import ModelLoadError
from .config_values import integer, malformed
from .decoder_config import MOST, LayerConfig
from .mamba_config import (
    FALCON_FORMAT,
    MAMBA2_FORMAT,
    MAMBA_FORMAT,
    NEMOTRON_FORMAT,
    Mamba2Config,
    read_factor,
    read_factors,
)

MIXER, ATTENTION, MLP, EXPERTS = "mixer", "attention", "mlp", "experts"
_KINDS = {
    "mamba": MIXER,
    "linear_attention": MIXER,
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
_LETTERS = {"M": MIXER, "*": ATTENTION, "-": MLP, "E": EXPERTS}  # of hybrid_override_pattern
Keys = dict[str, Any]


def granite_keys(hf_config: Keys) -> Keys:
    """The keys of Granite 4 H that other decoders have. Without experts, the MLP that stands beside
    them is that of a layer.
    """
    keys = hf_config | {"layer_types": None}
    if hf_config.get("num_local_experts") == 0:
        keys["intermediate_size"] = hf_config.get("shared_intermediate_size")
    return keys


def granite_fields(hf_config: Keys) -> Keys:
    """Fields of DecoderConfig. Without position_embedding_type "rope" no layer rotates."""
    mixer = MAMBA_FORMAT.parse(hf_config)
    kinds = _listed_kinds(hf_config, ("layer_types", "layers_block_type"), (MIXER, ATTENTION))
    fields: Keys = {"layers": _with_mlp(kinds, mixer)}
    position = hf_config.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise malformed("position_embedding_type", "'rope', 'nope' or null", position)
    if position != "rope":
        fields["unrotated_layers"] = tuple(range(len(kinds)))
    return fields


def bamba_fields(hf_config: Keys) -> Keys:
    """Fields of DecoderConfig."""
    given = hf_config.get("attn_layer_indices") or []
    # however many: hf_overrides may ask for fewer layers
    if not isinstance(given, list) or not all(type(index) is int for index in given):
        raise malformed("attn_layer_indices", "a list of layers", given)
    num_layers = hf_config["num_hidden_layers"]
    kinds = [ATTENTION if index in given else MIXER for index in range(num_layers)]
    return {"layers": _with_mlp(kinds, MAMBA_FORMAT.parse(hf_config))}


def falcon_fields(hf_config: Keys) -> Keys:
    """Fields of DecoderConfig. Every layer has both mixers.

    Factors of keys and of attention's input go where they cost nothing and round nothing: into
    the softmax's scale, and into the factor of attention's result.
    """
    mixer, num_layers = FALCON_FORMAT.parse(hf_config), hf_config["num_hidden_layers"]
    into = read_factor(hf_config, "attention_in_multiplier")
    if hf_config.get("attention_bias") and into != 1.0:  # it would not multiply the biases
        raise ModelLoadError(
            f"config.json: attention_in_multiplier={into} is not supported beside attention_bias"
        )
    head_dim = hf_config.get("head_dim")
    if head_dim is None:
        head_dim = hf_config["hidden_size"] // hf_config["num_attention_heads"]
    of_keys = read_factor(hf_config, "key_multiplier")
    return {
        "layers": (LayerConfig(mixer),) * num_layers,
        "attention_scale": head_dim**-0.5 * of_keys * into**2,
        "attention_out_scale": into * read_factor(hf_config, "attention_out_multiplier"),
        "logits_scale": read_factor(hf_config, "lm_head_multiplier"),
        "mlp_scales": read_factors(hf_config, "mlp_multipliers", ("gate", "down")),
    }


def nemotron_keys(hf_config: Keys) -> Keys:
    """The keys of Nemotron-H under the names that other decoders have."""
    kinds = _nemotron_kinds(hf_config)
    keys = hf_config | {
        "num_hidden_layers": len(kinds),
        "tie_word_embeddings": False,  # whatever config.json says, as in transformers
        "rms_norm_eps": hf_config.get("layer_norm_epsilon"),
    }
    return keys if EXPERTS in kinds else keys | {"n_routed_experts": 0}


def nemotron_fields(hf_config: Keys) -> Keys:
    """Fields of DecoderConfig. A layer has one block, and nothing rotates."""
    mixer, kinds = NEMOTRON_FORMAT.parse(hf_config), _nemotron_kinds(hf_config)
    blocks = {
        MIXER: LayerConfig(mixer, has_attention=False, has_mlp=False),
        ATTENTION: LayerConfig(has_mlp=False),
        MLP: LayerConfig(has_attention=False),
        EXPERTS: LayerConfig(has_attention=False),
    }
    return {
        "layers": tuple(blocks[kind] for kind in kinds),
        "unrotated_layers": tuple(range(len(kinds))),
    }


def nemotron_dense_layers(hf_config: Keys) -> tuple[int, ...]:
    """The layers without experts."""
    kinds = _nemotron_kinds(hf_config)
    return tuple(index for index, kind in enumerate(kinds) if kind != EXPERTS)


def nemotron_head_keys(hf_config: Keys) -> Keys:
    """The keys of the layers of a head for multi-token prediction, by default those that
    transformers and published models have. Raises ModelLoadError for a layer that keeps a state,
    which a draft would change, and for a head without attention.
    """
    listed, pattern = "mtp_layers_block_type", "mtp_hybrid_override_pattern"
    own = {key: hf_config.get(key) for key in (listed, pattern)}
    if own == {listed: None, pattern: None}:
        own[pattern] = "*E"
    kinds = _nemotron_kinds(own, listed, pattern)
    if MIXER in kinds or ATTENTION not in kinds:
        key = pattern if own[listed] is None else listed
        raise malformed(key, "attention and no mamba layers", own[key])
    letters = {kind: letter for letter, kind in _LETTERS.items()}
    return {
        "num_hidden_layers": None,
        "layers_block_type": None,
        "hybrid_override_pattern": "".join(letters[kind] for kind in kinds),
    }


def mamba2_keys(hf_config: Keys) -> Keys:
    """The keys of Mamba 2 under the names that other decoders have. Attention has no sizes, which
    the others must have; head_dim is that of the mixers.
    """
    return hf_config | {
        "rms_norm_eps": hf_config.get("layer_norm_epsilon"),
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "intermediate_size": hf_config.get("hidden_size"),
    }


def mamba2_fields(hf_config: Keys) -> Keys:
    """Fields of DecoderConfig. A layer is a mixer."""
    layer = LayerConfig(MAMBA2_FORMAT.parse(hf_config), has_attention=False, has_mlp=False)
    num_layers = hf_config["num_hidden_layers"]
    return {"layers": (layer,) * num_layers, "unrotated_layers": tuple(range(num_layers))}


def _nemotron_kinds(
    hf_config: Keys,
    listed: str = "layers_block_type",
    pattern: str = "hybrid_override_pattern",
) -> list[str]:
    """listed, pattern: the keys of a list of names and of a string of letters."""
    letters, allowed = hf_config.get(pattern), tuple(_LETTERS.values())
    if hf_config.get(listed) is not None or letters is None:
        return _listed_kinds(hf_config, (listed,), allowed)
    if not isinstance(letters, str) or not letters or set(letters) - _LETTERS.keys():
        raise malformed(pattern, f"letters of {', '.join(_LETTERS)}, one for each layer", letters)
    _check_length(hf_config, pattern, letters)
    return [_LETTERS[letter] for letter in letters]


def _listed_kinds(hf_config: Keys, keys: tuple[str, ...], allowed: Iterable[str]) -> list[str]:
    """The kinds that the first of these keys lists."""
    key = next((key for key in keys if hf_config.get(key) is not None), keys[0])
    listed, names = hf_config.get(key), [name for name in _KINDS if _KINDS[name] in allowed]
    if listed is None:
        raise ModelLoadError(f"config.json lacks {key}")
    if not isinstance(listed, list) or not listed or not set(map(str, listed)) <= set(names):
        raise malformed(key, f"a list of {', '.join(names)}", listed)
    _check_length(hf_config, key, listed)
    return [_KINDS[name] for name in listed]


def _check_length(hf_config: Keys, key: str, layers: Sequence[str]) -> None:
    """Raises ModelLoadError unless there are as many layers as config.json says elsewhere, if it
    does.
    """
    integer(f"the length of {key}", len(layers), MOST["num_hidden_layers"])
    num_layers = hf_config.get("num_hidden_layers")
    if num_layers not in (None, len(layers)):
        problem = f"has {len(layers)} entries for num_hidden_layers={num_layers!r:.100}"
        raise ModelLoadError(f"config.json: {key} {problem}")


def _with_mlp(kinds: list[str], mixer: Mamba2Config) -> tuple[LayerConfig, ...]:
    """Layers with attention or a mixer, and an MLP."""
    blocks = {MIXER: LayerConfig(mixer, has_attention=False), ATTENTION: LayerConfig()}
    return tuple(blocks[kind] for kind in kinds)
