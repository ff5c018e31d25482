"""What the metadata of a GGUF file says of a family whose layers differ in kind: which layers have
attention, which have a recurrent mixer, and how large the mixer is.

Must not know: files, tensors' values, torch, which architectures there are.

Readers as in gguf_families.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ModelLoadError
from .gguf import GGUFTensor
from .gguf_families import latent_sizes
from .qwen_families import LINEAR
from .rope_config import FULL

Own = dict[str, Any]
Tensors = Mapping[str, GGUFTensor]
Factors = list[float] | None

# Maps keys of the metadata to those of config.json.
OF_GATED_DELTA_NET = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
OF_KIMI = {
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "kda.head_dim": "linear_head_dim",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
}
OF_MAMBA = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
OF_NEMOTRON = {
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
}
OF_MAMBA2 = OF_NEMOTRON | {"ssm.state_size": "state_size", "ssm.time_step_rank": "num_heads"}
DRAFT_LAYERS = "nextn_predict_layers"
_KV_HEADS = "attention.head_count_kv"
_SIGMOID = 2  # of expert_gating_func


def gated_delta_net_config(own: Own, tensors: Tensors, factors: Factors) -> Own:
    """Of Qwen3.5. Older files have full_attention_interval in place of a list. The last layers may
    only predict tokens ahead; they are left out.
    """
    own.pop("rope.dimension_sections", None)  # of images, whose positions have three parts
    keys: Own = {"linear_value_head_dim": _head_size(own)}
    num_layers, num_drafts = own.get("block_count"), own.pop(DRAFT_LAYERS, 0)
    if isinstance(num_layers, int) and isinstance(num_drafts, int):
        keys["num_hidden_layers"] = num_layers - num_drafts
    recurrent = own.pop("attention.recurrent_layers", None)
    if isinstance(recurrent, list):
        keys["layer_types"] = [LINEAR if is_recurrent else FULL for is_recurrent in recurrent]
    return keys


def kimi_config(own: Own, tensors: Tensors, factors: Factors) -> Own:
    """Of Kimi Linear, whose mixers have as many heads as its attention. Raises ModelLoadError for
    experts that are chosen otherwise, and for sizes that do not fit.
    """
    _check_gating(own)
    kinds = _kinds(own, LINEAR, FULL)
    return latent_sizes(own) | kinds | {"linear_num_heads": own.get("attention.head_count")}


def short_conv_config(own: Own, tensors: Tensors, factors: Factors) -> Own:
    """Of LFM2 and LFM2-MoE. Raises ModelLoadError for experts that are chosen otherwise."""
    _check_gating(own)
    return _kinds(own, "conv", FULL)


def granite_config(own: Own, tensors: Tensors, factors: Factors) -> Own:
    """Of Granite 4 H. Where rotary embeddings are off, a key of their scaling says so. A model
    without experts has a plain MLP in their place.
    """
    is_rotated = own.pop("rope.scaling.finetuned", True)
    keys: Own = _kinds(own, "mamba", "attention") | {
        "position_embedding_type": "rope" if is_rotated else "nope",
        "mamba_d_head": _head_size(own),
    }
    if not own.get("expert_count"):
        keys |= {"num_local_experts": 0, "shared_intermediate_size": own.get("feed_forward_length")}
    return keys


def falcon_config(own: Own, tensors: Tensors, factors: Factors) -> Own:
    """Of Falcon-H1. All layers are alike, and the weights have been multiplied by its factors."""
    return {"mamba_d_head": _head_size(own)}


def mamba2_config(own: Own, tensors: Tensors, factors: Factors) -> Own:
    """Of Mamba 2, which has mixers alone."""
    for key in ("attention.head_count", _KV_HEADS, "feed_forward_length"):
        own.pop(key, None)
    return {"head_dim": _head_size(own)}


def nemotron_config(own: Own, tensors: Tensors, factors: Factors) -> Own:
    """Of Nemotron-H and Nemotron 3: a layer has attention, an MLP, experts or a mixer."""
    own.pop("expert_shared_count", None)  # the size is that of all together
    num_drafts = own.pop(DRAFT_LAYERS, 0)
    heads, widths = own.get(_KV_HEADS), own.get("feed_forward_length")
    if not isinstance(heads, list) or not isinstance(widths, list) or len(heads) != len(widths):
        wanted = "must be lists of one entry for each layer"
        raise ModelLoadError(f"{_KV_HEADS} and feed_forward_length {wanted}")
    kinds = []
    for layer, (count, width) in enumerate(zip(heads, widths)):
        mlp = "moe" if f"blk.{layer}.ffn_gate_inp.weight" in tensors else "mlp"
        kinds.append("attention" if count else mlp if width else "mamba")
    own[_KV_HEADS] = [count for count in heads if count != 0] or 1
    own["feed_forward_length"] = next((width for width in widths if width), 1)
    num_layers = len(kinds) - (num_drafts if isinstance(num_drafts, int) else 0)
    return {
        "num_hidden_layers": num_layers,
        "layers_block_type": kinds[:num_layers],
        "mamba_head_dim": _head_size(own),
    }


def _check_gating(own: Own) -> None:
    if (gating := own.pop("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise ModelLoadError(f"expert_gating_func must be {_SIGMOID}, sigmoid, got {gating!r:.100}")


def _kinds(own: Own, recurrent: str, attention: str) -> Own:
    """The kinds of layers: one without heads of keys is recurrent."""
    heads = own.get(_KV_HEADS)
    if not isinstance(heads, list):
        return {}
    own[_KV_HEADS] = [count for count in heads if count != 0] or 1
    return {"layer_types": [attention if count else recurrent for count in heads]}


def _head_size(own: Own) -> int | None:
    """The features of a mixer's head; the parser of the configuration names what is wrong."""
    size, heads = own.pop("ssm.inner_size", None), own.get("ssm.time_step_rank")
    if not (isinstance(size, int) and isinstance(heads, int) and heads > 0 and size % heads == 0):
        return None
    return size // heads
