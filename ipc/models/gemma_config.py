"""What config.json says about the layers of Gemma 4 beyond what all decoders have: sizes of heads
by layer, keys and values that layers share, inputs of layers from tables of their own.

Must not know: tensors, how any of it is computed.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ..errors import ModelLoadError
from .config_values import MOST_OF_A_SIZE, integer, malformed
from .decoder_config import LayerConfig, PerLayerInputs
from .rope_config import FULL, SLIDING

# transformers' defaults, where config.json lacks the key
_PATTERN, _GLOBAL_HEAD_DIM = 6, 512
_GEMMA2_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
_OF_LAYER = ("head_dim", "num_key_value_heads")  # keys of an entry of per_layer_config


def gemma2_keys(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of Gemma 2 with its caps of logits where keys are missing. Null is no cap."""
    return _GEMMA2_CAPS | hf_config


def gemma_keys(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The config.json with the keys that all decoders have, in their forms.

    Raises ModelLoadError, naming the key, for one that is malformed or unsupported.
    """
    num_layers = integer("num_hidden_layers", hf_config.get("num_hidden_layers"))
    kinds = hf_config.get("layer_types")
    if not kinds:
        kinds = [SLIDING if (i + 1) % _PATTERN else FULL for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise malformed("layer_types", f"a list of {num_layers} entries", kinds)
    directions = hf_config.get("use_bidirectional_attention")
    if directions not in (None, False, "vision"):  # "vision" concerns images alone
        raise ModelLoadError(
            f"config.json: use_bidirectional_attention={directions!r:.100} is not supported; "
            f"supported: null, 'vision'"
        )
    own: dict[str, Any] = {"layer_types": [*kinds[:-1], FULL], "use_bidirectional_attention": None}
    if hf_config.get("rope_parameters") is None:
        own["rope_parameters"] = _ROPES
    own["num_experts_per_tok"] = hf_config.get("top_k_experts")
    if not _switch(hf_config, "enable_moe_block"):
        own["num_experts"] = 0
    return hf_config | own


def gemma_fields(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Fields of DecoderConfig."""
    hf_config = gemma_keys(hf_config)
    kinds = hf_config["layer_types"]
    owners = key_owners(hf_config)
    is_wide, key_is_value = (
        _switch(hf_config, key) for key in ("use_double_wide_mlp", "attention_k_eq_v")
    )
    sizes = _sizes_by_layer(hf_config)
    layers = []
    for index, (kind, owner) in enumerate(zip(kinds, owners)):
        width = hf_config["intermediate_size"] * (2 if is_wide and owner is not None else 1)
        layers.append(
            replace(
                sizes.get(index, LayerConfig()),
                kv_from=owner,
                has_values=not (key_is_value and kind == FULL),
                intermediate_size=width,
            )
        )
    return {"layers": tuple(layers), "per_layer_inputs": _per_layer_inputs(hf_config)}


def key_owners(hf_config: dict[str, Any]) -> list[int | None]:
    """For each layer the one whose keys and values it reads, None where it has its own. The last
    num_kv_shared_layers share those of the last layer before them that has their type.

    Raises ModelLoadError where there is none.
    """
    kinds, num_layers = hf_config["layer_types"], hf_config["num_hidden_layers"]
    num_sharing = _count(hf_config, "num_kv_shared_layers", 0, num_layers - 1)
    first_sharing = num_layers - num_sharing
    last_owners = {kind: index for index, kind in enumerate(kinds[:first_sharing])}
    for kind in kinds[first_sharing:]:
        if kind not in last_owners:
            raise ModelLoadError(
                f"config.json: num_kv_shared_layers={num_sharing} leaves no layer of the type "
                f"{kind} with keys and values"
            )
    return [None] * first_sharing + [last_owners[kind] for kind in kinds[first_sharing:]]


def _sizes_by_layer(hf_config: dict[str, Any]) -> dict[int, LayerConfig]:
    """The layers that have heads of other sizes than most."""
    given = hf_config.get("per_layer_config")
    if given is None:
        num_heads = 0
        if _switch(hf_config, "attention_k_eq_v"):
            num_heads = _count(hf_config, "num_global_key_value_heads", 0)
        head_dim = _count(hf_config, "global_head_dim", _GLOBAL_HEAD_DIM)
        full = LayerConfig(head_dim=head_dim, num_kv_heads=num_heads)
        kinds = hf_config["layer_types"]
        return {index: full for index, kind in enumerate(kinds) if kind == FULL}
    if not isinstance(given, dict) or not all(
        isinstance(own, dict) and own.keys() <= {*_OF_LAYER} for own in given.values()
    ):
        raise malformed("per_layer_config", f"by layer {' and '.join(_OF_LAYER)}", given)
    found: dict[int, LayerConfig] = {}
    for layer, own in given.items():
        index = str(layer)
        if not index.isdecimal() or int(index) >= hf_config["num_hidden_layers"]:
            raise malformed("per_layer_config", "an object of layers", given)
        name = f"per_layer_config: {index}: "
        head_dim, num_heads = (
            integer(name + key, own[key]) if key in own else 0 for key in _OF_LAYER
        )
        found[int(index)] = LayerConfig(head_dim=head_dim, num_kv_heads=num_heads)
    return found


def _per_layer_inputs(hf_config: dict[str, Any]) -> PerLayerInputs | None:
    size = _count(hf_config, "hidden_size_per_layer_input", 0)
    if not size:
        return None
    key, least = "vocab_size_per_layer_input", hf_config["vocab_size"]
    return PerLayerInputs(size, integer(key, hf_config.get(key, least), least=least))


def _count(hf_config: dict[str, Any], key: str, default: int, most: int = MOST_OF_A_SIZE) -> int:
    value = hf_config.get(key)
    return integer(key, value, most) if value else default


def _switch(hf_config: dict[str, Any], key: str) -> bool:
    value = hf_config.get(key)
    if value not in (None, False, True):
        raise malformed(key, "true or false", value)
    return bool(value)
