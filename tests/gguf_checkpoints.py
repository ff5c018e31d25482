"""GGUF files made of a checkpoint's tensors, with the `gguf` package and llama.cpp's conventions:
names, permuted heads of the llama architecture, frequency factors, types of blocks.
"""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "granite": "granite",
    "ministral3": "mistral3",
    "bitnet": "bitnet-b1.58",
}
_PERMUTED = ("llama", "smollm3", "granite", "mistral3")
_PARTS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OWN_PARTS = {
    "gemma3": _SANDWICH,
    "olmo2": _SANDWICH,
    "exaone4": _SANDWICH,
    "gemma2": _SANDWICH,
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "mlp.gate_up_proj": "ffn_up",
    },
    "hunyuan-dense": {
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
    },
    "bitnet-b1.58": {
        "self_attn.attn_sub_norm": "attn_sub_norm",
        "mlp.ffn_sub_norm": "ffn_sub_norm",
    },
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "phi3": {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"},
}


def write_gguf(
    path: Path,
    checkpoint: Path,
    type: str = "F32",
    others: Mapping[str, str] = {},
    tensors_in_a_part: int = 0,
) -> dict[str, torch.Tensor]:
    """Writes matrices as blocks of `type` and vectors as F32. `others`: names of the checkpoint
    with another type. `tensors_in_a_part`: splits the model over several files.

    Returns the fp32 tensors that the file stands for, by the checkpoint's names.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_in_a_part)
    _add_config(writer, config)
    add_tokenizer(writer, checkpoint, config)
    stored: dict[str, torch.Tensor] = {}
    if (factors := frequency_factors(config)) is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            as_type = others.get(name, type if tensor.dim() == 2 else "F32")
            is_shifted = config["model_type"] == "gemma3_text" and name.endswith("norm.weight")
            shift = 1.0 if is_shifted else 0.0
            packed, kind = quantize((tensor.float() + shift).numpy(), as_type)
            values = torch.from_numpy(gguf.dequantize(packed, kind).copy())
            stored[name] = (values.double() - shift).float()
            tensor_name = gguf_name(name, ARCHITECTURES[config["model_type"]])
            writer.add_tensor(tensor_name, permuted(name, packed, config), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def gguf_name(name: str, architecture: str = "llama") -> str:
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_PARTS[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    parts = _PARTS | _OWN_PARTS.get(architecture, {})
    return f"blk.{layer}.{parts[part]}.{kind}"


def permuted(name: str, rows: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """The rows of q and k of the llama architecture: row i of a head's first half, then row i of
    its second half, for every i.
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    key = heads.get(name.split(".")[-2])
    if ARCHITECTURES[config["model_type"]] not in _PERMUTED or key is None:
        return rows
    return rows.reshape(config[key], 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def quantize(tensor: np.ndarray, type: str) -> tuple[np.ndarray, GGMLQuantizationType]:
    kind = GGMLQuantizationType[type]
    return (_quantize_q4_k(tensor) if type == "Q4_K" else gguf.quantize(tensor, kind)), kind


def _quantize_q4_k(tensor: np.ndarray) -> np.ndarray:
    """[rows, columns] -> [rows, bytes]: the nearest of 16 steps between zero or less and the
    largest of 32 weights.
    """
    x = tensor.reshape(-1, 8, 32)
    least = np.maximum(-x.min(-1), 0)
    step = (x.max(-1) + least) / 15
    scale, least_scale = (v.max(-1, keepdims=True).astype(np.float16) for v in (step / 63, least))
    least_scale = (least_scale / np.float16(63)).astype(np.float16)
    steps, leasts = (
        np.rint(v / np.where(s == 0, 1, s.astype(np.float32))).clip(0, 63).astype(np.uint8)
        for v, s in ((step, scale), (least, least_scale))
    )
    exact_step = (scale.astype(np.float32) * steps)[..., None]
    exact_least = (least_scale.astype(np.float32) * leasts)[..., None]
    numbers = np.rint((x + exact_least) / np.where(exact_step == 0, 1, exact_step))
    numbers = numbers.clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = [
        scale.view(np.uint8),
        least_scale.view(np.uint8),
        steps[:, :4] | steps[:, 4:] >> 4 << 6,
        leasts[:, :4] | leasts[:, 4:] >> 4 << 6,
        steps[:, 4:] & 15 | leasts[:, 4:] << 4,
        (numbers[:, :, 0] | numbers[:, :, 1] << 4).reshape(-1, 128),
    ]
    return np.concatenate(packed, axis=1).reshape(len(tensor), -1)


def frequency_factors(config: dict[str, Any]) -> np.ndarray | None:
    """What Llama 3's scaling divides each frequency by, [head_dim / 2]; None for other models."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    factors = []
    for i in range(0, head_dim, 2):
        turns = rope["original_max_position_embeddings"] / (
            2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        )
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, dtype=np.float32)


def _add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if (window := config.get("sliding_window")) is not None:
        writer.add_sliding_window(window)
        if layer_types := config.get("layer_types"):
            pattern = [layer_type == "sliding_attention" for layer_type in layer_types]
            writer.add_sliding_window_pattern(pattern)
    elif config["model_type"] == "phi3":
        writer.add_sliding_window(0)
    if config["model_type"] == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if config["model_type"] == "ministral3" and rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        for kind in ("long", "short"):
            factors = np.array(rope[f"{kind}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, config: dict[str, Any]) -> None:
    """The tiny models' byte-level BPE, padded to the model's vocabulary."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    tokens = {i: token for token, i in tokenizer["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, gguf.TokenType.NORMAL)
    for added in tokenizer["added_tokens"]:
        special = added["special"]
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    for i in range(config["vocab_size"]):
        if i not in tokens:
            tokens[i], types[i] = f"[PAD{i}]", gguf.TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens[i] for i in range(config["vocab_size"])])
    writer.add_token_types([types[i] for i in range(config["vocab_size"])])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    written = json.loads((checkpoint / "tokenizer_config.json").read_text())
    writer.add_chat_template(written["chat_template"])


def write_encoder_gguf(path: Path, checkpoint: Path, type: str = "F32", **metadata: Any) -> None:
    """A text encoder as llama.cpp converts it: BERT or nomic-bert with a WordPiece vocabulary, or
    XLM-RoBERTa with SentencePiece's unigrams. Vectors and small tables are F32. `metadata`: keys
    under tokenizer.ggml, None to leave one out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    is_nomic = config["model_type"] == "nomic_bert"
    arch = gguf.MODEL_ARCH.NOMIC_BERT if is_nomic else gguf.MODEL_ARCH.BERT
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    skipped = config["pad_token_id"] + 1 if config["model_type"] == "xlm-roberta" else 0
    writer.add_context_length(config["max_position_embeddings"] - skipped)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    if is_nomic:
        writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    values = json.loads((checkpoint / "tokenizer.json").read_text())
    for key, value in {**tokenizer_of_encoder(values, config), **metadata}.items():
        if value is not None:
            _add(writer, f"tokenizer.ggml.{key}", value)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        stem, _, kind = name.rpartition(".")
        stem = stem.removeprefix(f"{config['model_type'].replace('-', '_')}.").removeprefix(
            "roberta."
        )
        if stem.startswith("pooler") or kind == "position_ids":
            continue
        found = names.get_name(stem)
        assert found is not None, name
        if found == "position_embd":
            tensor = tensor[skipped:]
        is_matrix = tensor.dim() == 2 and found.startswith(("blk", "token_embd"))
        packed, number = quantize(tensor.float().numpy(), type if is_matrix else "F32")
        writer.add_tensor(f"{found}.{kind}", packed, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_of_encoder(values: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The keys under tokenizer.ggml of a tokenizer.json."""
    special = {token["content"]: token["id"] for token in values["added_tokens"]}
    vocab = values["model"]["vocab"]
    if values["model"]["type"] == "WordPiece":
        tokens = sorted(vocab, key=vocab.__getitem__)
        found = {
            "model": "bert",
            "tokens": [_in_gguf(text, text in special) for text in tokens],
            "token_type": [3 if text in special else 1 for text in tokens],
            "seperator_token_id": special["[SEP]"],
            "cls_token_id": special["[CLS]"],
            "unknown_token_id": special["[UNK]"],
        }
    else:
        kinds = {"<unk>": 2} | dict.fromkeys(["<s>", "</s>", "<pad>", "<mask>"], 3)
        charsmap = b64decode((values["normalizer"] or {}).get("precompiled_charsmap") or "")
        found = {
            "model": "t5",
            "tokens": [text for text, _ in vocab],
            "scores": [float(score) for _, score in vocab],
            "token_type": [kinds.get(text, 1) for text, _ in vocab],
            "add_space_prefix": True,
            "remove_extra_whitespaces": True,
            "bos_token_id": special["<s>"],
            "eos_token_id": special["</s>"],
            "precompiled_charsmap": charsmap or None,
        }
    return found | {"token_type_count": config["type_vocab_size"]}


def _in_gguf(text: str, is_special: bool) -> str:
    if is_special:
        return text
    return text[2:] if text.startswith("##") else f"▁{text}"


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[Any, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        str: writer.add_string,
    }
    kinds.get(value.__class__, writer.add_array)(key, value)
