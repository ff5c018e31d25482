"""GGUF files of Gemma 4 as llama.cpp's converter writes them, made of a tiny checkpoint: names from
the `gguf` package's tables, metadata by layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from quire.tests.gguf_checkpoints import add_tokenizer, quantize
from safetensors.torch import load_file

Tensors = Iterator[tuple[str, np.ndarray]]  # names of the file, with their endings
_ENDLESS = 1e30


def write_family_gguf(path: Path, checkpoint: Path, type: str = "F32") -> None:
    """Writes matrices whose rows consist of whole blocks as blocks of `type`, and others as F32."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture, add_config, convert = _FAMILIES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
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


_FAMILIES: dict[str, Any] = {
    "gemma4_text": (gguf.MODEL_ARCH.GEMMA4, _add_gemma4, _gemma4),
}
