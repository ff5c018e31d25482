"""GGUF files of the families whose layers differ in kind, from their checkpoints. The gguf package
names the tensors; the metadata and the changes of weights are those of llama.cpp's conversion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import MODEL_ARCH_NAMES
from quire.tests.gguf_checkpoints import add_tokenizer, quantize
from safetensors.torch import load_file

# model_type -> general.architecture
ARCHITECTURES = {
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "nemotron_h": "nemotron_h",
    "mamba2": "mamba2",
    "kimi_linear": "kimi-linear",
}
HAS_HEAD = "has_head"  # for multi-token prediction: a key of the tests' own
Tensors = Iterator[tuple[str, torch.Tensor]]


def write_hybrid_gguf(path: Path, checkpoint: Path, type: str = "F32") -> None:
    """Writes matrices as blocks of `type` and other tensors as F32."""
    config = json.loads((checkpoint / "config.json").read_text())
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    architecture = ARCHITECTURES[config["model_type"]]
    if architecture == "nemotron_h" and "moe" in config["layers_block_type"]:
        architecture = "nemotron_h_moe"
    number = next(one for one, name in MODEL_ARCH_NAMES.items() if name == architecture)
    tensors = _with_head_as_a_layer(load_file(checkpoint / "model.safetensors"), config)
    config[HAS_HEAD] = any(".nextn." in name for name in tensors)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"] + config[HAS_HEAD])
    writer = gguf.GGUFWriter(path, architecture)
    _add_config(writer, config)
    add_tokenizer(writer, checkpoint, config)
    for name, tensor in _stacked(tensors).items():
        for stem, part in _changed(name, tensor.float(), config):
            if stem.endswith(".A_log") and architecture.startswith(("qwen3", "kimi")):
                found = f"blk.{stem.split('.')[2]}.ssm_a"
            elif stem.startswith("blk."):
                found = stem
            else:
                found = names.get_name(stem, (".weight", ".bias"))
                assert found is not None, stem
                found += "" if found.endswith((".weight", ".bias")) else _ending(found)
            values = part.contiguous().numpy()
            is_block = values.ndim == 3 or (values.ndim == 2 and min(values.shape) > 8)
            is_block &= "conv" not in found.split(".")[2:][-2:] and "ffn_gate_inp" not in found
            as_type = type if is_block and "ssm_conv1d" not in found else "F32"
            packed, kind = quantize(values, as_type)
            writer.add_tensor(found, packed, raw_dtype=kind)
    if (
        architecture == "qwen35" and not config[HAS_HEAD]
    ):  # a layer that predicts a token ahead, in part
        for part in ("attn_norm", "nextn.enorm", "nextn.hnorm"):
            values = np.zeros(config["hidden_size"], dtype=np.float32)
            writer.add_tensor(f"blk.{config['num_hidden_layers']}.{part}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _with_head_as_a_layer(
    tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """With Qwen's head for multi-token prediction as a layer after the others."""
    layer = config["num_hidden_layers"]
    own = {
        "mtp.layers.0.": f"model.layers.{layer}.",
        "mtp.fc.": f"blk.{layer}.nextn.eh_proj.",
        "mtp.pre_fc_norm_embedding.": f"blk.{layer}.nextn.enorm.",
        "mtp.pre_fc_norm_hidden.": f"blk.{layer}.nextn.hnorm.",
        "mtp.norm.": f"blk.{layer}.nextn.shared_head_norm.",
    }
    renamed = {}
    for name, tensor in tensors.items():
        old = next((one for one in own if name.startswith(one)), "")
        renamed[own.get(old, "") + name.removeprefix(old)] = tensor
    return renamed


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With the experts of a layer in one tensor, and those of LFM2 and Kimi Linear under the names
    of the others.
    """
    if any(".experts.0.w1." in name for name in tensors):
        parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        tensors = {
            re.sub(r"(experts\.\d+\.)(w\d)", lambda m: m[1] + parts[m[2]], name): tensor
            for name, tensor in tensors.items()
        }
    found = {name: re.sub(r"(\.experts)\.\d+", r"\1", name) for name in tensors}
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        stacks.setdefault(found[name], []).append(tensors[name])
    return {
        name: torch.stack(parts) if name not in tensors else parts[0]
        for name, parts in stacks.items()
    }


def _ending(found: str) -> str:
    return "" if found.endswith(("ssm_a", "ssm_d")) else ".weight"


def _changed(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Tensors:
    """The tensors that the conversion makes of one, under names of transformers or of the file."""
    name = name.replace("dt_bias", "dt_proj.bias")
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if "conv1d.weight" in name or "conv.conv.weight" in name:
        tensor = tensor.squeeze(1)
    model_type = config["model_type"]
    if model_type == "kimi_linear":
        yield from _of_kimi(name, tensor, config)
        return
    if model_type.startswith("qwen3"):
        if name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor + 1
    if name.endswith("in_proj_qkvz.weight"):
        yield from _gates_apart(name, tensor, config)
        return
    if model_type.startswith("qwen3_5"):
        tensor = _value_heads_apart(name, tensor, config)
    elif model_type == "granitemoehybrid":
        yield from _of_granite(name, tensor, config)
        return
    elif model_type == "falcon_h1":
        tensor = _multiplied(name, tensor, config)
        yield from _of_mamba(name, tensor, config["mamba_n_groups"])
        return
    elif model_type in ("nemotron_h", "mamba2"):
        if model_type == "nemotron_h":
            tensor = _interleaved(name, tensor, config)
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = re.sub(r"backbone(.*)\.mixer\.experts\.", r"model\1.mlp.experts.", name)
        yield from _of_mamba(name, tensor, config["n_groups"])
        return
    if name.endswith("experts.gate_up_proj"):
        for part, half in zip(("gate_proj", "up_proj"), tensor.chunk(2, 1)):
            yield name.replace("gate_up_proj", part), half
        return
    if name.endswith("shared_expert_gate.weight"):
        tensor = tensor.squeeze(0)
    yield (
        name.replace("expert_bias", "expert_bias.bias") if "lfm2_moe" in model_type else name,
        tensor,
    )


def _of_kimi(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Tensors:
    """Convolutions have a dimension of one before and after the channels."""
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    name = name.replace("block_sparse_moe", "mlp")
    if "conv1d.weight" in name:
        yield name, tensor[None, :, None]
    elif name.endswith("kv_b_proj.weight"):
        sizes = config["qk_nope_head_dim"], config["v_head_dim"]
        keys, values = tensor.view(-1, sum(sizes), tensor.shape[1]).split(sizes, dim=1)
        yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
        yield name.replace("kv_b_proj", "v_b_proj"), values
    else:
        yield name, tensor


def _gates_apart(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Tensors:
    """Queries, keys, values and gates of each key head to one tensor of the first three, and one
    of gates.
    """
    num_keys, key_size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // num_keys * config["linear_value_head_dim"]
    parts = tensor.view(num_keys, -1, tensor.shape[1]).split([key_size] * 2 + [values] * 2, 1)
    *qkv, gates = (part.flatten(0, 1) for part in parts)
    yield name.replace("qkvz", "qkv"), torch.cat(qkv)
    yield name.replace("qkvz", "z"), gates


def _value_heads_apart(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Value heads in the order of Qwen3.5's files: the first one of each key head, then the
    second ones.
    """
    num_keys, num_values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    keys = 2 * num_keys * config["linear_key_head_dim"]

    def in_order(rows: torch.Tensor) -> torch.Tensor:
        by_key = rows.view(num_keys, num_values // num_keys, -1, *rows.shape[1:])
        return by_key.transpose(0, 1).reshape(rows.shape)

    part = name.split(".linear_attn.")[-1]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        assert len(tensor) == keys + num_values * size
        return torch.cat([tensor[:keys], in_order(tensor[keys:])])
    heads = ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_proj.bias")
    if part in heads:
        return in_order(tensor)
    return in_order(tensor.T.contiguous()).T if part == "out_proj.weight" else tensor


def _of_granite(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> Tensors:
    """Queries and keys are interleaved, whether the model rotates them or not."""
    layer = name.split(".")[2] if ".layers." in name else ""
    experts = config["num_local_experts"] > 0
    tensor = _interleaved(name, tensor, config)
    if name.endswith("input_linear.weight"):
        is_shared = "shared_mlp" in name
        ending = "_exps" if not is_shared else "_shexp" if experts else ""
        for part, half in zip(("gate", "up"), tensor.chunk(2, -2)):
            yield f"blk.{layer}.ffn_{part}{ending}.weight", half
    elif name.endswith("shared_mlp.output_linear.weight"):
        yield f"blk.{layer}.ffn_down{'_shexp' if experts else ''}.weight", tensor
    else:
        yield from _of_mamba(name, tensor, config["mamba_n_groups"])


def _interleaved(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    for part, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".{part}." in name:
            halves = tensor.view(config[heads], 2, -1, *tensor.shape[1:])
            return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _multiplied(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """By the factors of Falcon-H1, as no key of the metadata has them."""
    into = config["attention_in_multiplier"]
    factors = {
        "embed_tokens.weight": config["embedding_multiplier"],
        "lm_head.weight": config["lm_head_multiplier"],
        "q_proj.weight": into,
        "k_proj.weight": into * config["key_multiplier"],
        "v_proj.weight": into,
        "o_proj.weight": config["attention_out_multiplier"],
        "gate_proj.weight": config["mlp_multipliers"][0],
        "down_proj.weight": config["mlp_multipliers"][1],
        "mamba.out_proj.weight": config["ssm_out_multiplier"],
    }
    if name.endswith("mamba.in_proj.weight"):
        inner = config["mamba_n_heads"] * config["mamba_d_head"]
        states = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = inner, inner, states, states, config["mamba_n_heads"]
        scales = [scale * config["ssm_in_multiplier"] for scale in config["ssm_multipliers"]]
        return torch.cat([part * scale for part, scale in zip(tensor.split(sizes), scales)])
    return tensor * next((factors[end] for end in factors if name.endswith(end)), 1.0)


def _of_mamba(name: str, tensor: torch.Tensor, num_groups: int) -> Tensors:
    layer = name.split(".")[2] if ".layers." in name else ""
    part = re.split(r"\.mamba\.|\.mixer\.", name)[-1]
    if name.endswith("pre_ff_layernorm.weight"):
        yield f"blk.{layer}.ffn_norm", tensor
        return
    if part in ("A_log", "D"):
        yield f"blk.{layer}.{'ssm_a' if part == 'A_log' else 'ssm_d'}", tensor[:, None]
    elif part == "norm.weight":
        yield f"blk.{layer}.ssm_norm.weight", tensor.view(num_groups, -1)
    else:
        yield name, tensor


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    num_layers = config["num_hidden_layers"]
    if config["model_type"] == "mamba2":
        _add_mamba2(writer, config)
        return
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config.get("model_max_length") or config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    num_drafts = int(config[HAS_HEAD] or config["model_type"] == "qwen3_5_text")
    writer.add_block_count(num_layers + num_drafts)
    if num_drafts:
        writer.add_nextn_predict_layers(num_drafts)
    writer.add_head_count(heads)
    epsilons = ("layer_norm_epsilon", "norm_eps", "rms_norm_eps")
    writer.add_layer_norm_rms_eps(next(config[key] for key in epsilons if key in config))
    rope = config.get("rope_parameters") or config
    if config["model_type"] == "kimi_linear":
        _add_kimi(writer, config)
        return
    if config["model_type"] != "nemotron_h":
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if config.get("intermediate_size") and config["model_type"] != "nemotron_h":
        writer.add_feed_forward_length(config["intermediate_size"])
    _ADDERS[config["model_type"]](writer, config)


def _add_kimi(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, rotary_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(
        [1 if kind == "full_attention" else 0 for kind in config["layer_types"]]
    )
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_kda_head_dim(config["linear_head_dim"])
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotary_dim)
    writer.add_key_length(rank + rotary_dim)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_leading_dense_block_count(config["mlp_layer_types"].count("dense"))
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["moe_renormalize"])


def _add_qwen(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    is_recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    is_recurrent += [False] if config[HAS_HEAD] or config["model_type"] == "qwen3_5_text" else []
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", is_recurrent)
    writer.add_rope_dimension_sections([2, 1, 1, 0])
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _add_lfm(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_head_count_kv(_kv_heads(config))
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "moe" in config["model_type"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _add_granite(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_head_count_kv(_kv_heads(config))
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if config["num_local_experts"]:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    _add_mamba(writer, config)


def _add_mamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    names = ("mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head")
    _add_ssm(writer, *(config[name] for name in names))


def _add_ssm(
    writer: gguf.GGUFWriter, taps: int, size: int, groups: int, heads: int, head_dim: int
) -> None:
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(size)
    writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * head_dim)


def _add_falcon(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_head_count_kv(config["num_key_value_heads"])
    _add_mamba(writer, config)


def _add_mamba2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(0)
    writer.add_feed_forward_length(0)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    names = ("conv_kernel", "state_size", "n_groups", "num_heads", "head_dim")
    _add_ssm(writer, *(config[name] for name in names))


def _add_nemotron(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    kinds = config["layers_block_type"]
    heads, is_moe = config["num_key_value_heads"], "moe" in kinds
    width = config["moe_intermediate_size" if is_moe else "intermediate_size"]
    has_heads = [kind in ("attention", "full_attention") for kind in kinds]
    writer.add_head_count_kv([heads if one else 0 for one in has_heads])
    writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    names = ("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim")
    _add_ssm(writer, *(config[name] for name in names))
    if is_moe:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        size = config["moe_shared_expert_intermediate_size"]
        writer.add_expert_shared_feed_forward_length(size)
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_moe_latent_size(config["moe_latent_size"])


def _kv_heads(config: dict[str, Any]) -> list[int]:
    has_heads = (kind in ("full_attention", "attention") for kind in config["layer_types"])
    return [config["num_key_value_heads"] if one else 0 for one in has_heads]


_ADDERS = {
    "qwen3_5_text": _add_qwen,
    "qwen3_5_moe_text": _add_qwen,
    "qwen3_next": _add_qwen,
    "lfm2": _add_lfm,
    "lfm2_moe": _add_lfm,
    "granitemoehybrid": _add_granite,
    "falcon_h1": _add_falcon,
    "nemotron_h": _add_nemotron,
}
