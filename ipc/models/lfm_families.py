"""What config.json says of LFM2, LFM2-MoE and LFM3 beside what all decoders have: which layers have
short convolutions in place of attention, and how wide an MLP is.

Must not know: tensors, layers, how any of it is computed.
"""

from __future__ import annotations

from typing import Any

from .config_values import integer, malformed
from .decoder_config import LayerConfig
from .mixers import ShortConvConfig
from .qwen_families import MOST_TAPS, listed_kinds, num_layers_of
from .rope_config import FULL, SLIDING

Keys = dict[str, Any]
CONV = "conv"


def lfm_keys(hf_config: Keys) -> Keys:
    """The keys of LFM2-MoE under the names that other decoders have."""
    keys = hf_config | {"rms_norm_eps": hf_config["norm_eps"], "layer_types": None}
    if hf_config.get("tie_embedding") is not None:
        keys["tie_word_embeddings"] = hf_config["tie_embedding"]
    return keys


def lfm2_keys(hf_config: Keys) -> Keys:
    """Those of LFM2, whose MLPs are narrower than config.json says."""
    size = hf_config.get("block_ff_dim")
    keys = lfm_keys(hf_config)
    if size is not None:
        keys["intermediate_size"] = integer("block_ff_dim", size)
    size = keys.get("intermediate_size")
    if hf_config["block_auto_adjust_ff_dim"] and isinstance(size, int):
        factor = hf_config["block_ffn_dim_multiplier"]
        if not isinstance(factor, (int, float)) or not 0 < factor <= 1000:
            raise malformed("block_ffn_dim_multiplier", "a number above 0, at most 1000", factor)
        multiple = integer("block_multiple_of", hf_config["block_multiple_of"])
        least = int(factor * int(2 * size / 3))
        keys["intermediate_size"] = -(-least // multiple) * multiple
    return keys


def lfm3_keys(hf_config: Keys) -> Keys:
    """Those of LFM3. What it says of windows is about layers with attention."""
    kinds = lfm3_kinds(hf_config)
    return lfm_keys(hf_config) | {
        "layer_types": [FULL if kind == CONV else kind for kind in kinds],
    }


def lfm2_fields(hf_config: Keys) -> Keys:
    """Fields of DecoderConfig."""
    kinds, num_layers = listed_kinds(hf_config, (CONV, FULL)), num_layers_of(hf_config)
    if kinds is None:
        given = hf_config.get("full_attn_idxs")
        if given is None:
            given = list(range(num_layers))
        if not isinstance(given, list) or not all(type(index) is int for index in given):
            raise malformed("full_attn_idxs", "a list of layers", given)
        kinds = [FULL if index in given else CONV for index in range(num_layers)]
    return _layers(hf_config, kinds)


def lfm3_fields(hf_config: Keys) -> Keys:
    """Fields of DecoderConfig."""
    return _layers(hf_config, lfm3_kinds(hf_config))


def lfm3_kinds(hf_config: Keys) -> list[str]:
    """The kinds of the layers; of those that are not listed, transformers'."""
    kinds = listed_kinds(hf_config, (CONV, FULL, SLIDING))
    if kinds is None:
        cycle = SLIDING, CONV, FULL, CONV
        kinds = [cycle[index % 4] for index in range(num_layers_of(hf_config))]
        kinds[0] = CONV
    return kinds


def _layers(hf_config: Keys, kinds: list[str]) -> Keys:
    bias = hf_config.get("conv_bias") or False
    if bias not in (False, True):
        raise malformed("conv_bias", "true or false", bias)
    taps = integer("conv_L_cache", hf_config["conv_L_cache"], MOST_TAPS, 2)
    mixer = ShortConvConfig(hf_config["hidden_size"], taps, bias)
    recurrent = LayerConfig(mixer, has_attention=False)
    return {"layers": tuple(recurrent if kind == CONV else LayerConfig() for kind in kinds)}
