"""What config.json says of Hunyuan V1 beside what all decoders have: a rotary embedding whose base
is stretched by a fixed factor, sizes that may be listed by layer.

Must not know: tensors, layers, how any of it is computed.
"""

from __future__ import annotations

from typing import Any

from ..errors import ModelLoadError
from .config_values import integer, malformed
from .decoder_config import MOST
from .rope_config import DEFAULT_THETA

Keys = dict[str, Any]
_MOST_ALPHA = 1e9
_LISTED = ("num_experts", "moe_topk", "num_shared_expert")  # may be lists, by layer


def hunyuan_keys(hf_config: Keys) -> Keys:
    """The keys that other decoders have. What checkpoints call a "dynamic" rotary embedding with a
    fixed alpha is the default one with another base: theta * alpha ** (D / (D - 2)).

    Raises ModelLoadError, naming the key, for one that is malformed or unsupported.
    """
    keys = {key: _same_in_all_layers(key, hf_config.get(key)) for key in _LISTED}
    keys = {key: value for key, value in keys.items() if value is not None}
    if "moe_topk" in keys:
        keys["num_experts_per_tok"] = keys["moe_topk"]
    if keys.get("num_shared_expert", 1) != 1:
        raise malformed("num_shared_expert", "1", keys["num_shared_expert"])
    own = hf_config | keys
    if own.get("head_dim") is None:
        own["head_dim"] = hf_config.get("attention_head_dim")
    rope = hf_config.get("rope_scaling") or hf_config.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("alpha") is not None:
        theta = rope.get("rope_theta", hf_config.get("rope_theta") or DEFAULT_THETA)
        own |= {"rope_scaling": None, "rope_parameters": _stretched(rope, theta, _head_dim(own))}
    return own


def _stretched(rope: Keys, theta: Any, head_dim: int) -> Keys:
    alpha, kind = rope["alpha"], rope.get("rope_type") or rope.get("type")
    if kind != "dynamic":
        raise ModelLoadError(
            f"config.json: alpha of the rope type {kind!r:.100} is not supported; supported: "
            f"dynamic"
        )
    for key, value, least in (("alpha", alpha, 1), ("rope_theta", theta, 1)):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not least <= value <= _MOST_ALPHA:
            raise malformed(key, f"a number from {least} to {_MOST_ALPHA:,.0f}", value)
    if head_dim <= 2:
        raise malformed("head_dim", "more than 2", head_dim)
    return {"rope_type": "default", "rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}


def _head_dim(hf_config: Keys) -> int:
    heads, most = hf_config.get("num_attention_heads"), MOST["num_attention_heads"]
    size = integer("hidden_size", hf_config.get("hidden_size"))
    default = size // integer("num_attention_heads", heads, most)
    given = hf_config.get("head_dim")
    return integer("head_dim", default if given is None else given, MOST["head_dim"])


def _same_in_all_layers(key: str, value: Any) -> Any:
    if not isinstance(value, list):
        return value
    if not value or any(one != value[0] for one in value):
        raise malformed(key, "the same in all layers", value)
    return value[0]
