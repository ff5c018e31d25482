"""What the metadata of a GGUF file says in a family's own terms: sizes by layer, sizes of latent
vectors.

Must not know: files, torch, the names of tensors beyond the few that tell a form from another.

A reader takes the keys that it reads out of the metadata, and returns keys of config.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from ..errors import ModelLoadError
from .gguf import GGUFTensor
from .rope_config import FULL, SLIDING

_LOCAL_BASE = 10_000.0  # of the rotary embedding in layers with a window
_GEMMA4_BASE = 1_000_000.0


def gemma4_config(
    own: dict[str, Any], tensors: Mapping[str, GGUFTensor], factors: list[float] | None
) -> dict[str, Any]:
    """Gemma 4's. `own`: metadata without the architecture's name. `factors`: those of the file's
    rotary embedding, None if it has none.

    Raises ModelLoadError, naming the key, for sizes by layer that config.json cannot express.
    """
    pattern = own.pop("attention.sliding_window_pattern", None)
    num_layers = own.get("block_count")
    if not isinstance(pattern, list) or len(pattern) != num_layers or not num_layers:
        raise _malformed("attention.sliding_window_pattern", "a list of one entry for each layer")
    head_dim, local_dim = _head_sizes(own)
    if factors is None:
        raise ModelLoadError("there is no tensor rope_freqs.weight")
    heads = _by_layer(own, "attention.head_count_kv", num_layers)
    local_heads = next((heads[i] for i in range(num_layers) if pattern[i]), heads[-1])
    full = [i for i in range(num_layers) if not pattern[i]]
    if any(heads[i] != local_heads for i in range(num_layers) if pattern[i]):
        raise _malformed("attention.head_count_kv", "the same for all layers with a window")
    num_sharing = own.get("attention.shared_kv_layers", 0)
    if not isinstance(num_sharing, int):
        raise _malformed("attention.shared_kv_layers", "an integer")
    experts = own.pop("expert_count", 0)
    table = tensors.get("per_layer_token_embd.weight")
    return {
        "layer_types": [SLIDING if has_window else FULL for has_window in pattern],
        "head_dim": local_dim,
        "num_key_value_heads": local_heads,
        "per_layer_config": {
            str(i): {"head_dim": head_dim, "num_key_value_heads": heads[i]} for i in full
        },
        "attention_k_eq_v": any(
            f"blk.{i}.attn_k.weight" in tensors and f"blk.{i}.attn_v.weight" not in tensors
            for i in full
        ),
        "enable_moe_block": bool(experts),
        "num_experts": experts,
        "rope_parameters": _ropes(own, factors),
        **_widths(_by_layer(own, "feed_forward_length", num_layers), num_sharing),
        **(
            {}
            if table is None or not table.shape
            else {"vocab_size_per_layer_input": table.shape[0]}
        ),
    }


def gemma3n_config(
    own: dict[str, Any], tensors: Mapping[str, GGUFTensor], _: list[float] | None
) -> dict[str, Any]:
    """Gemma 3n's. `own` is as in gemma4_config.

    Raises ModelLoadError, naming the key, for what config.json cannot express.
    """
    config: dict[str, Any] = {"rope_local_base_freq": own.pop("rope.freq_base_swa", _LOCAL_BASE)}
    if (widths := own.pop("feed_forward_length", None)) is not None:
        config["intermediate_size"] = widths
    if (cuts := own.pop("activation_sparsity_scale", None)) is not None:
        if not isinstance(cuts, list) or not all(isinstance(cut, float) for cut in cuts):
            raise _malformed("activation_sparsity_scale", "a list of numbers, one for each layer")
        config["activation_sparsity_pattern"] = [_dropped(cut) for cut in cuts]
    rows = [
        tensor.shape[0] if (tensor := tensors.get(f"{name}.weight")) and tensor.shape else 0
        for name in ("per_layer_token_embd", "token_embd")
    ]
    if rows[0] < rows[1]:
        raise ModelLoadError("per_layer_token_embd.weight must have as many rows as token_embd")
    return config | {"vocab_size_per_layer_input": rows[0]}


def _dropped(deviations: float) -> float:
    """The part of normally distributed numbers that lie below so many deviations from the mean. A
    file has 32 bits of that number, which makes some five digits of the part.
    """
    return round(NormalDist().cdf(deviations), 5)


_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func
_ENDLESS = 1e29  # what is divided by it does not rotate


def deepseek2_config(
    own: dict[str, Any], tensors: Mapping[str, GGUFTensor], _: list[float] | None
) -> dict[str, Any]:
    """That of DeepSeek V2 and V3, and of what is one of them: Kimi K2, GLM-4.7-Flash. `own` is as
    in gemma4_config. A correction of the experts' scores tells V3 from V2.

    Raises ModelLoadError, naming the key, for a router that neither has.
    """
    sizes = latent_sizes(own)
    if (log_multiplier := own.get("rope.scaling.yarn_log_multiplier")) is not None:
        if not isinstance(log_multiplier, (int, float)):
            raise _malformed("rope.scaling.yarn_log_multiplier", "a number")
        # 0.1 times the key of config.json, whose other one is always the same
        weight = round(10 * log_multiplier, 6)
        own |= {"rope.scaling.yarn_log_multiplier": weight, "rope.scaling.mscale": weight}
    is_v3 = any(name.endswith(".exp_probs_b.bias") for name in tensors)
    gating = own.pop("expert_gating_func", None)
    if gating not in (None, _SIGMOID if is_v3 else _SOFTMAX):
        wanted = f"{_SIGMOID} with" if is_v3 else f"{_SOFTMAX} without"
        raise _malformed("expert_gating_func", f"{wanted} exp_probs_b, got {gating!r:.100}")
    if not is_v3 and own.get("expert_weights_norm"):
        raise _malformed("expert_weights_norm", "false without exp_probs_b")
    num_layers = _without_drafts(own)
    kind = "V3" if is_v3 else "V2"
    return {
        "num_hidden_layers": num_layers,
        "architectures": [f"Deepseek{kind}ForCausalLM"],
        "model_type": f"deepseek_{kind.lower()}",
        **sizes,
        "topk_method": "noaux_tc" if is_v3 else "group_limited_greedy",
    }


def indexed_config(
    own: dict[str, Any], tensors: Mapping[str, GGUFTensor], factors: list[float] | None
) -> dict[str, Any]:
    """That of DeepSeek V3.2 and GLM-5, whose layers are those of DeepSeek V3 with an indexer. `own`
    is as in gemma4_config.
    """
    own.pop("attention.indexer.types", None)  # which layers use the one of an earlier layer
    found = deepseek2_config(own, tensors, factors)
    return {key: found[key] for key in found if key not in ("architectures", "model_type")}


def latent_sizes(own: dict[str, Any]) -> dict[str, Any]:
    """The keys of config.json for the heads of latent attention. `own` is as in gemma4_config.

    Raises ModelLoadError, naming the key, for sizes that do not fit.
    """
    rotary_dim = own.pop("rope.dimension_count", None)
    key_dim = own.pop("attention.key_length_mla", own.get("attention.key_length"))
    value_dim = own.pop("attention.value_length_mla", own.get("attention.value_length"))
    for key in ("attention.key_length", "attention.value_length", "attention.head_count_kv"):
        own.pop(key, None)  # they follow from the sizes of latent vectors
    if not isinstance(rotary_dim, int) or not isinstance(key_dim, int) or rotary_dim >= key_dim:
        raise _malformed("rope.dimension_count", "less than attention.key_length_mla")
    return {
        "num_key_value_heads": own.get("attention.head_count"),
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": key_dim - rotary_dim,
        "v_head_dim": value_dim,
    }


def glm4_moe_config(
    own: dict[str, Any], tensors: Mapping[str, GGUFTensor], _: list[float] | None
) -> dict[str, Any]:
    """That of GLM-4.5 and 4.6. `own` is as in gemma4_config; the layers that only predict tokens
    ahead are left out.
    """
    if (gating := own.pop("expert_gating_func", None)) not in (None, _SIGMOID):
        raise _malformed("expert_gating_func", f"{_SIGMOID}, got {gating!r:.100}")
    return {"num_hidden_layers": _without_drafts(own)}


def _without_drafts(own: dict[str, Any]) -> int:
    """The number of layers but for the last ones, which only predict tokens ahead."""
    num_layers, num_drafts = own.pop("block_count", None), own.pop("nextn_predict_layers", 0)
    if not isinstance(num_layers, int) or not isinstance(num_drafts, int):
        raise _malformed("block_count and nextn_predict_layers", "integers")
    return num_layers - num_drafts


def rotated_part(factors: Sequence[float]) -> float:
    """The part of the frequencies that rotate, where the file's factors are 1 for the first ones
    and endless for the others.
    """
    count = sum(factor == 1 for factor in factors)
    if not count or min(factors[count:], default=_ENDLESS) < _ENDLESS or factors[count - 1] != 1:
        raise ModelLoadError("rope_freqs.weight must be 1 for the first frequencies, then 1e30")
    return count / len(factors)


def _ropes(own: dict[str, Any], factors: list[float]) -> dict[str, Any]:
    return {
        SLIDING: {
            "rope_type": "default",
            "rope_theta": own.pop("rope.freq_base_swa", _LOCAL_BASE),
        },
        FULL: {
            "rope_type": "proportional",
            "rope_theta": own.pop("rope.freq_base", _GEMMA4_BASE),
            "partial_rotary_factor": rotated_part(factors),
        },
    }


def _head_sizes(own: dict[str, Any]) -> tuple[Any, Any]:
    """The size of a head in layers without and with a window. Values have that of keys, and all
    features rotate.
    """
    head_dim = own.pop("attention.key_length", None)
    local_dim = own.pop("attention.key_length_swa", head_dim)
    for key, size in (
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        ("attention.value_length_swa", local_dim),
        ("rope.dimension_count_swa", local_dim),
    ):
        if (given := own.pop(key, size)) != size:
            raise _malformed(key, f"the size of a head, {size}, not {given!r:.100}")
    return head_dim, local_dim


def _by_layer(own: dict[str, Any], key: str, num_layers: int) -> list[Any]:
    value = own.pop(key, None)
    values = value if isinstance(value, list) else [value] * num_layers
    if len(values) != num_layers or not all(isinstance(one, int) for one in values):
        raise _malformed(key, f"an integer, or a list of {num_layers}")
    return values


def _widths(widths: list[Any], num_sharing: int) -> dict[str, Any]:
    """The width of the layers' MLPs, twice as much where layers share keys and values."""
    width, is_wide = widths[0], widths[-1] != widths[0]
    first_sharing = len(widths) - num_sharing
    if widths != [
        width if i < first_sharing or not is_wide else 2 * width for i in range(len(widths))
    ]:
        raise _malformed("feed_forward_length", "equal, or twice as much in the last layers")
    return {"intermediate_size": width, "use_double_wide_mlp": is_wide}


def _malformed(key: str, wanted: str) -> ModelLoadError:
    return ModelLoadError(f"{key} must be {wanted}")
