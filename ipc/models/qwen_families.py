"""What config.json says of Qwen3-Next and of Qwen3.5, 3.6 and 3.8 beside what all decoders have:
which layers have Gated DeltaNet in place of attention.

Must not know: tensors, layers, how any of it is computed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ..errors import ModelLoadError
from .config_values import integer, malformed
from .decoder_config import MOST, LayerConfig
from .mixers import GatedDeltaNetConfig
from .rope_config import FULL

Keys = dict[str, Any]
LINEAR = "linear_attention"
# Keys of GGUF files: see is_interleaved and has_gates_apart of GatedDeltaNetConfig.
INTERLEAVED, GATES_APART = "interleaved_value_heads", "gates_apart"
MOST_TAPS = 64  # of a convolution
MOST_OF_A_MIXER = 65_536  # of heads and of features of a head
# of images, whose positions have three parts; those of a text are alike
_OF_IMAGES = ("mrope_section", "mrope_interleaved")


def qwen_keys(hf_config: Keys) -> Keys:
    """The keys that other decoders have. Layers with attention see the whole context. A model whose
    MLPs are all mixtures of experts has no intermediate_size.
    """
    keys = qwen_vl_keys(hf_config) | {"layer_types": None}
    if keys.get("intermediate_size") is None:
        keys["intermediate_size"] = keys.get("shared_expert_intermediate_size")
    return keys


def qwen_vl_keys(hf_config: Keys) -> Keys:
    """The keys that other decoders have, for a model whose positions have three parts."""
    keys = dict(hf_config)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(given := keys.get(key), dict):
            given = {name: given[name] for name in given if name not in _OF_IMAGES}
            kinds = {
                name: "default" for name in ("type", "rope_type") if given.get(name) == "mrope"
            }
            keys[key] = given | kinds
    return keys


def qwen_fields(hf_config: Keys, *, is_by_key_head: bool = False) -> Keys:
    """Fields of DecoderConfig. is_by_key_head: see GatedDeltaNetConfig.

    Raises ModelLoadError, naming the key, for one that is out of range.
    """
    num_layers = num_layers_of(hf_config)
    kinds = listed_kinds(hf_config, (LINEAR, FULL))
    if kinds is None:
        every = integer("full_attention_interval", hf_config["full_attention_interval"])
        kinds = [FULL if (index + 1) % every == 0 else LINEAR for index in range(num_layers)]
    size = partial(_size, hf_config)
    mixer = GatedDeltaNetConfig(
        size("linear_num_key_heads"),
        size("linear_num_value_heads"),
        size("linear_key_head_dim"),
        size("linear_value_head_dim"),
        size("linear_conv_kernel_dim", MOST_TAPS, 2),
        hf_config.get("rms_norm_eps", 1e-6),
        is_by_key_head,
        has_gates_apart=hf_config.get(GATES_APART) is True,
        is_interleaved=hf_config.get(INTERLEAVED) is True,
    )
    if mixer.num_value_heads % mixer.num_key_heads:
        wanted = f"a multiple of linear_num_key_heads={mixer.num_key_heads}"
        raise malformed("linear_num_value_heads", wanted, mixer.num_value_heads)
    recurrent = LayerConfig(mixer, has_attention=False)
    return {"layers": tuple(LayerConfig() if kind == FULL else recurrent for kind in kinds)}


def _size(hf_config: Keys, key: str, most: int = MOST_OF_A_MIXER, least: int = 1) -> int:
    return integer(key, hf_config.get(key), most, least)


def num_layers_of(hf_config: Keys) -> int:
    """Raises ModelLoadError for a number that is missing or out of range."""
    key = "num_hidden_layers"
    return integer(key, hf_config.get(key), MOST[key])


def listed_kinds(hf_config: Keys, allowed: tuple[str, ...]) -> list[str] | None:
    """The kinds of the layers in layer_types; None where config.json lists none. hf_overrides may
    ask for fewer layers than it lists.

    Raises ModelLoadError, naming the key, for an unknown kind and for too few.
    """
    listed, num_layers = hf_config.get("layer_types"), num_layers_of(hf_config)
    if not listed:
        return None
    if not isinstance(listed, list) or not set(map(str, listed)) <= set(allowed):
        raise malformed("layer_types", f"a list of {', '.join(allowed)}", listed)
    if len(listed) < num_layers:
        raise ModelLoadError(
            f"config.json: layer_types has {len(listed)} entries for num_hidden_layers={num_layers}"
        )
    return listed[:num_layers]
