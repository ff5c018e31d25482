"""What config.json says of Kimi Linear beside what other decoders with latent attention have: which
layers have Kimi Delta Attention in place of attention, and its sizes.

Must not know: tensors, layers, how any of it is computed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..errors import ModelLoadError
from .config_values import integer, malformed
from .decoder_config import LayerConfig
from .latent_config import latent_fields, latent_keys
from .mixers import KimiDeltaConfig
from .qwen_families import LINEAR, MOST_OF_A_MIXER, MOST_TAPS, listed_kinds, num_layers_of
from .rope_config import FULL

Keys = dict[str, Any]
# what config.json calls the keys of other decoders
_RENAMED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
# Keys of linear_attn_config in published files, and what transformers calls them at the top. The
# lists count layers from 1.
_NESTED, _FULL_LAYERS, _DELTA_LAYERS = "linear_attn_config", "full_attn_layers", "kda_layers"
_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# the only value that each of these keys may have
_FIXED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid"}


def kimi_keys(hf_config: Keys) -> Keys:
    """The keys that other decoders have. Layers with attention see the whole context.

    Raises ModelLoadError, naming the key, for attention that rotates, and for other routers.
    """
    for key, wanted in _FIXED.items():
        if hf_config.get(key, wanted) != wanted:
            raise malformed(key, repr(wanted), hf_config[key])
    keys = latent_keys(hf_config) | {"layer_types": None}
    for key, name in _RENAMED.items():
        if hf_config.get(key) is not None:
            keys[name] = hf_config[key]
    return keys


def kimi_fields(hf_config: Keys) -> Keys:
    """Fields of DecoderConfig.

    Raises ModelLoadError, naming the key, for one that is missing or out of range.
    """
    nested = _nested(hf_config)
    size = partial(_size, hf_config, nested)
    mixer = KimiDeltaConfig(
        size("num_heads"),
        size("head_dim"),
        size("short_conv_kernel_size", MOST_TAPS, 2),
        hf_config["rms_norm_eps"],
    )
    layers = {FULL: LayerConfig(), LINEAR: LayerConfig(mixer, has_attention=False)}
    kinds = _kinds(hf_config, nested)
    return latent_fields(hf_config) | {
        "layers": tuple(layers[kind] for kind in kinds),
        "unrotated_layers": tuple(range(len(kinds))),
    }


def _nested(hf_config: Keys) -> Keys:
    nested = hf_config.get(_NESTED)
    if nested is not None and not isinstance(nested, dict):
        raise malformed(_NESTED, "an object", nested)
    return nested or {}


def _size(
    hf_config: Keys, nested: Keys, key: str, most: int = MOST_OF_A_MIXER, least: int = 1
) -> int:
    given = nested.get(key)
    name = _SIZES[key] if given is None else f"{_NESTED}.{key}"
    return integer(name, hf_config.get(_SIZES[key]) if given is None else given, most, least)


def _kinds(hf_config: Keys, nested: Keys) -> list[str]:
    """The kinds of the layers: those of layer_types, else those of linear_attn_config."""
    num_layers = num_layers_of(hf_config)
    kinds = listed_kinds(hf_config, (LINEAR, FULL))
    if kinds is not None:
        return kinds
    by_layer: dict[int, str] = {}
    for key, kind in ((_FULL_LAYERS, FULL), (_DELTA_LAYERS, LINEAR)):
        listed = nested.get(key)
        if not isinstance(listed, list) or not all(type(one) is int for one in listed):
            raise malformed(f"{_NESTED}.{key}", "a list of layers, counted from 1", listed)
        by_layer |= dict.fromkeys(listed, kind)
    if missing := [layer for layer in range(1, num_layers + 1) if layer not in by_layer]:
        raise ModelLoadError(
            f"config.json: {_NESTED} lists layer {missing[0]} neither in {_FULL_LAYERS} nor in "
            f"{_DELTA_LAYERS}"
        )
    return [by_layer[layer] for layer in range(1, num_layers + 1)]
