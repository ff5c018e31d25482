"""GGUF files of Gemma 3n, Gemma 4 and latent attention as llama.cpp's converter writes them,
made of a tiny checkpoint: names from the `gguf` package's tables, metadata by layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from quire.tests.gguf_checkpoints import add_tokenizer, quantize
from safetensors.torch import load_file, save_file

Tensors = Iterator[tuple[str, np.ndarray]]  # names of the file, with their endings
_ENDLESS = 1e30


def round_to_blocks(checkpoint: Path, type: str) -> None:
    """Makes of all matrices that write_family_gguf writes as blocks what the blocks stand for."""
    config = json.loads((checkpoint / "config.json").read_text())
    kind = gguf.GGMLQuantizationType[type]
    columns = gguf.GGML_QUANT_SIZES[kind][0]

    def rounded(values: np.ndarray) -> np.ndarray:
        if values.ndim == 1 or values.shape[-1] % columns:
            return values
        return gguf.dequantize(gguf.quantize(np.ascontiguousarray(values), kind), kind)

    tensors = {}
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        values = tensor.numpy()
        if name.endswith(".kv_b_proj.weight"):
            by_head = values.reshape(config["num_attention_heads"], -1, values.shape[-1])
            of_keys, of_values = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
            parts = [rounded(of_keys.swapaxes(1, 2)).swapaxes(1, 2), rounded(of_values)]
            values = np.concatenate(parts, axis=1).reshape(values.shape)
        else:
            values = rounded(values)
        tensors[name] = torch.from_numpy(values.copy())
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


def write_family_gguf(path: Path, checkpoint: Path, type: str = "F32") -> None:
    """Writes matrices whose rows consist of whole blocks as blocks of `type`, and others as F32."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture, add_config, convert = _FAMILIES[config["model_type"]]
    # the package may not know DeepSeek V3.2, whose tensors have the names of GLM-5's
    is_v32 = config["model_type"] == "deepseek_v32"
    writer = gguf.GGUFWriter(path, "deepseek32" if is_v32 else gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, config)
    add_config(writer, config)
    add_tokenizer(writer, checkpoint, config)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    stored = load_file(checkpoint / "model.safetensors")
    for name, values in convert(config, {k: v.float().numpy() for k, v in stored.items()}):
        if not name.endswith((".weight", ".bias", ".scale")):
            name += ".weight"
        stem, _, kind = name.rpartition(".")
        found = stem if stem == "rope_freqs" else names.get_name(stem)
        assert found is not None, name
        columns = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]][0]
        is_vector = values.ndim == 1 or values.shape[-1] % columns or "ffn_gate_inp" in found
        packed, number = quantize(np.ascontiguousarray(values), "F32" if is_vector else type)
        writer.add_tensor(f"{found}.{kind}", packed, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kinds, num_layers = config["layer_types"], config["num_hidden_layers"]
    num_sharing, heads = config["num_kv_shared_layers"], config["num_key_value_heads"]
    full = config["per_layer_config"]["1"]
    has_window = [kind == "sliding_attention" for kind in kinds]
    width = config["intermediate_size"]
    writer.add_feed_forward_length(
        [width if i < num_layers - num_sharing else 2 * width for i in range(num_layers)]
        if config["use_double_wide_mlp"]
        else width
    )
    full_heads = full.get("num_key_value_heads")
    writer.add_head_count_kv(
        heads if full_heads is None else [heads if one else full_heads for one in has_window]
    )
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_rope_dimension_count(full["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(has_window)
    writer.add_shared_kv_layers(num_sharing)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _gemma4(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Tensors:
    """With keys in the layers that share those of others, as the published checkpoints have them.
    The factors of the rotary embedding are endless where a frequency does not rotate.
    """
    num_layers = config["num_hidden_layers"]
    part = config["rope_parameters"]["full_attention"]["partial_rotary_factor"]
    count = config["per_layer_config"]["1"]["head_dim"] // 2
    factors = [1.0 if i < part * count else _ENDLESS for i in range(count)]
    yield "rope_freqs", np.array(factors, dtype=np.float32)
    for name, values in tensors.items():
        layer = name.split(".layers.")[-1].split(".")[0]
        if name.endswith(".router.scale"):
            yield f"model.layers.{layer}.router.proj.scale", values
        elif name.endswith(".per_expert_scale"):
            yield f"model.layers.{layer}.experts.down_proj.scale", values
        else:
            yield name, values
    for layer in range(num_layers - config["num_kv_shared_layers"], num_layers):
        for part_name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            yield (
                f"model.layers.{layer}.self_attn.{part_name}",
                tensors[f"model.layers.{layer % 2}.self_attn.{part_name}"],
            )


def _add_gemma3n(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([k == "sliding_attention" for k in config["layer_types"]])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    normal, parts = torch.distributions.Normal(0, 1), config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale(normal.icdf(torch.tensor(parts)).tolist())


def _gemma3n(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Tensors:
    """With keys in the layers that share those of others, as the published checkpoints have them.
    Projections of streams are stacked, and tables have rows of zeros for tokens that they lack.
    """
    num_layers, vocab_size = config["num_hidden_layers"], config["vocab_size"]
    others = range(1, config["altup_num_inputs"] - 1)
    for name, values in tensors.items():
        if "embed_tokens" in name:
            yield name, np.pad(values, ((0, vocab_size - len(values)), (0, 0)))
        elif "projections.0." in name:
            rest = [tensors[name.replace(".0.", f".{i}.")] for i in others]
            yield name.replace(".0.", "."), np.stack([values, *rest])
        elif "_projections." not in name:
            yield name, values
    for layer in range(num_layers - config["num_kv_shared_layers"], num_layers):
        for part_name in ("k_proj.weight", "v_proj.weight", "k_norm.weight"):
            yield (
                f"model.layers.{layer}.self_attn.{part_name}",
                tensors[f"model.layers.0.self_attn.{part_name}"],
            )


def _add_deepseek2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, rotary_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    is_v2 = config["model_type"] == "deepseek_v2"
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(1)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotary_dim)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotary_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    kinds = config.get("mlp_layer_types")
    num_dense = kinds.index("sparse") if kinds else config["first_k_dense_replace"]
    writer.add_leading_dense_block_count(num_dense)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    kind = gguf.ExpertGatingFuncType.SOFTMAX if is_v2 else gguf.ExpertGatingFuncType.SIGMOID
    writer.add_expert_gating_func(kind)


def _add_indexed(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    _add_deepseek2(writer, config)
    arch = writer.arch
    writer.add_uint32(f"{arch}.attention.indexer.head_count", config["index_n_heads"])
    writer.add_uint32(f"{arch}.attention.indexer.key_length", config["index_head_dim"])
    writer.add_uint32(f"{arch}.attention.indexer.top_k", config["index_topk"])
    if kinds := config.get("indexer_types"):
        writer.add_array(f"{arch}.attention.indexer.types", [kind == "full" for kind in kinds])


def _deepseek2(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Tensors:
    """The weight of keys and values is in two parts, of which the first is transposed by head."""
    heads, key_dim = config["num_attention_heads"], config["qk_nope_head_dim"]
    for name, values in tensors.items():
        if name.endswith(".kv_b_proj.weight"):
            by_head = values.reshape(heads, -1, values.shape[-1])
            of_keys, of_values = by_head[:, :key_dim], by_head[:, key_dim:]
            yield name.replace("kv_b_proj", "k_b_proj"), of_keys.swapaxes(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), of_values
        elif name.endswith(".e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), values
        elif ".experts.0." in name:
            experts = range(config["n_routed_experts"])
            stacked = [tensors[name.replace(".experts.0.", f".experts.{i}.")] for i in experts]
            yield name.replace(".experts.0.", ".experts."), np.stack(stacked)
        elif ".experts." not in name:
            yield name, values


_DEEPSEEK2 = gguf.MODEL_ARCH.DEEPSEEK2, _add_deepseek2, _deepseek2
_INDEXED = gguf.MODEL_ARCH.GLM_DSA, _add_indexed, _deepseek2
_FAMILIES: dict[str, Any] = {
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _INDEXED),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _DEEPSEEK2),
    "gemma3n_text": (gguf.MODEL_ARCH.GEMMA3N, _add_gemma3n, _gemma3n),
    "gemma4_text": (gguf.MODEL_ARCH.GEMMA4, _add_gemma4, _gemma4),
}
