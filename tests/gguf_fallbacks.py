"""GGUF files of models that run in transformers' code. The gguf package names the tensors; the
metadata and the changes of weights are those of llama.cpp's conversion.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES
from quire.tests.gguf_checkpoints import quantize

# model_type -> general.architecture
ARCHITECTURES = {
    "gemma": "gemma",
    "gemma2": "gemma2",
    "starcoder2": "starcoder2",
    "phi": "phi2",
    "glm4": "glm4",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "nemotron": "nemotron",
    "exaone4": "exaone4",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "mixtral": "llama",
    "gpt_oss": "gpt-oss",
    "glm": "chatglm",
    "glm4_moe": "glm4moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "ernie4_5_moe": "ernie4_5-moe",
    "olmo": "olmo",
    "arcee": "arcee",
}
SHIFTED = ("gemma", "gemma2", "nemotron")  # norms are stored with 1 added
PERMUTED = ("mixtral", "olmo", "arcee")


def write_fallback_gguf(
    path: Path, model: Any, type: str = "Q8_0", is_fused: bool = False, factors: Any = None
) -> None:
    """Writes the parameters of a model of transformers and gives the model the values that the file
    has: matrices as blocks of `type`, vectors and routers as F32.

    is_fused: q, k and v are one tensor. factors: divisors of frequencies.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    number = next(one for one, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    _add_config(writer, config)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    fused: dict[str, list[np.ndarray]] = {}
    biases = [pair for pair in model.named_buffers() if pair[0].endswith("correction_bias")]
    for name, parameter in [*model.named_parameters(), *biases]:
        parts = {name: parameter.data}
        if "experts.gate_up_proj" in name and config.model_type == "gpt_oss":
            rows = parameter.data if name.endswith("_bias") else parameter.data.transpose(1, 2)
            halves = (rows[:, ::2], rows[:, 1::2])
            parts = {name.replace("gate_up", half): t for half, t in zip(("gate", "up"), halves)}
        elif name.endswith("experts.down_proj") and config.model_type == "gpt_oss":
            parts = {name: parameter.data.transpose(1, 2)}
        elif name.endswith("experts.gate_up_proj"):
            gate, up = parameter.data.chunk(2, 1)
            stem = name.removesuffix("gate_up_proj")
            parts = {f"{stem}gate_proj": gate, f"{stem}up_proj": up}
        for part, tensor in parts.items():
            stored = part.replace("_bias", ".bias").replace(".gate.moe_statics.", ".moe_statics.")
            found = names.get_name(stored, (".weight", ".bias"))
            assert found is not None, part
            found += "" if found.endswith((".weight", ".bias")) else ".weight"
            shift = 1.0 if name.endswith("norm.weight") and config.model_type in SHIFTED else 0.0
            values = (tensor.squeeze(0) if tensor.shape[0] == 1 else tensor).contiguous().numpy()
            is_plain = values.ndim == 1 or "ffn_gate_inp" in found or found.endswith(".bias")
            packed, kind = quantize(values + np.float32(shift), "F32" if is_plain else type)
            exact = torch.from_numpy(gguf.dequantize(packed, kind).copy())
            tensor.copy_((exact.double() - shift).view(tensor.shape))
            if config.model_type in PERMUTED and (heads := _heads(part, config)):
                packed = packed.reshape(heads, 2, -1, *packed.shape[1:]).swapaxes(1, 2)
                packed = packed.reshape(-1, *packed.shape[3:])
            if is_fused and (of_layer := re.fullmatch(r"(blk\.\d+\.attn_)[qkv](\..+)", found)):
                rows = fused.setdefault("qkv".join(of_layer.groups()), [])
                rows.append(packed)
                if len(rows) == 3:
                    joined = np.concatenate(rows)
                    writer.add_tensor("qkv".join(of_layer.groups()), joined, raw_dtype=kind)
            else:
                writer.add_tensor(found, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _heads(name: str, config: Any) -> int | None:
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else None


def _add_config(writer: gguf.GGUFWriter, config: Any) -> None:
    given = config.to_dict()
    heads, rope = config.num_attention_heads, config.rope_parameters
    head_dim = given.get("head_dim") or config.hidden_size // heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads or heads)
    if "head_dim" in given:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "rms_norm_eps" in given:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key in ("layer_norm_eps", "norm_epsilon", "norm_eps"):
        if key in given:
            writer.add_layer_norm_eps(given[key])
    if rope["rope_theta"] != 10_000.0:  # some conversions leave it out
        writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    for key in ("num_experts", "num_local_experts"):
        if key in given:
            writer.add_expert_count(given[key])
            writer.add_expert_used_count(config.num_experts_per_tok)
    if "moe_intermediate_size" in given:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "ernie4_5_moe":
        writer.add_expert_count(config.moe_num_experts)
        writer.add_expert_used_count(config.moe_k)
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
    if config.model_type == "glm4_moe":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.model_type == "hunyuan_v1_moe":
        writer.add_expert_shared_count(1)
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.intermediate_size)
    if config.model_type == "gpt_oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if config.model_type in ("gemma2", "cohere2", "exaone4", "gpt_oss") and config.sliding_window:
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "exaone4" and config.sliding_window:
        writer.add_sliding_window_pattern([t == "sliding_attention" for t in config.layer_types])
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "olmo":
        writer.add_layer_norm_eps(1e-5)
        writer.add_clamp_kqv(config.clip_qkv)
    if "logit_scale" in given:
        writer.add_logit_scale(config.logit_scale)
