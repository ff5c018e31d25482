"""Configurations from GGUF metadata: they equal config.json's, and unsupported metadata raises an
error that names it.
"""

from __future__ import annotations

from pathlib import Path
from struct import pack
from typing import Any

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.architectures import ARCHITECTURES
from quire.ipc.models.decoder_config import unread_keys
from quire.ipc.models.gguf import GGUFFile, read_gguf
from quire.ipc.models.gguf_config import gguf_config, gguf_generation_config
from quire.tests.gguf_files import write_gguf

LLAMA = {
    "general.architecture": "llama",
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 128,
    "llama.block_count": 2,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 16,
    "llama.vocab_size": 30,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}
CONFIG_JSON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 32,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EMBEDDING = {"token_embd.weight": ((32, 64), "F16", bytes(32 * 64 * 2))}


def _file(tmp_path: Path, metadata: dict[str, Any], tensors: dict = EMBEDDING) -> GGUFFile:
    return read_gguf(write_gguf(tmp_path / "m.gguf", metadata, tensors))


def test_a_llama_has_the_config_json_it_came_from(tmp_path: Path) -> None:
    assert gguf_config(_file(tmp_path, LLAMA)) == CONFIG_JSON


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"llama.attention.key_length": 32, "llama.rope.dimension_count": 32}, {"head_dim": 32}),
        ({"llama.rope.dimension_count": 8}, {"partial_rotary_factor": 0.5}),
        ({"llama.attention.head_count_kv": [2, 2]}, {"num_key_value_heads": 2}),
        ({"llama.expert_count": 0, "llama.expert_used_count": 0}, {}),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 2.0}, {}),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.5},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        ),
        (
            {"llama.rope.scale_linear": 4.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
                "llama.rope.scaling.finetuned": True,
                "llama.rope.scaling.yarn_beta_fast": 32.0,
            },
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "beta_fast": 32.0,
                }
            },
        ),
        ({"llama.something": 3}, {"llama.something": 3}),
    ],
)
def test_keys(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    config = gguf_config(_file(tmp_path, LLAMA | changes))
    assert config == CONFIG_JSON | expected


def test_tensors_tell_what_no_key_says(tmp_path: Path) -> None:
    bias, factors = ((64,), "F32", bytes(256)), [1.0, 1.5, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]
    tensors = EMBEDDING | {
        "output.weight": EMBEDDING["token_embd.weight"],
        "blk.0.attn_q.bias": bias,
        "blk.0.ffn_up.bias": bias,
        "rope_freqs.weight": ((8,), "F32", pack("<8f", *factors)),
    }
    config = gguf_config(_file(tmp_path, LLAMA, tensors))
    changed = {key: value for key, value in config.items() if CONFIG_JSON.get(key) != value}
    assert changed == {
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "factors", "factors": factors},
    }


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_the_engine_reads_it(architecture: str, tmp_path: Path) -> None:
    metadata = {
        key.replace("llama.", f"{architecture}."): value for key, value in LLAMA.items()
    } | {"general.architecture": architecture}
    config = gguf_config(_file(tmp_path, metadata))
    parsed = ARCHITECTURES[config["architectures"][0]].parse(config)
    assert (parsed.head_dim, parsed.rms_norm_eps, parsed.vocab_size) == (16, 1e-5, 32)
    assert parsed.rope["rope_theta"] == 500000.0
    assert unread_keys(config) == []


def test_gemma3_has_windows_in_five_of_six_layers(tmp_path: Path) -> None:
    """The file does not say which, nor how the layers with a window rotate."""
    metadata = {
        "general.architecture": "gemma3",
        **{
            key.replace("llama.", "gemma3."): value
            for key, value in LLAMA.items()
            if key.startswith("llama.")
        },
        "gemma3.block_count": 12,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.attention.sliding_window": 512,
    }
    config = ARCHITECTURES["Gemma3ForCausalLM"].parse(gguf_config(_file(tmp_path, metadata)))
    assert config.sliding_windows == (*[512] * 5, 0) * 2
    assert (config.rope["rope_theta"], config.sliding_rope["rope_theta"]) == (1e6, 1e4)


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_attention_of_the_27b_is_scaled_otherwise(
    name: str, layers: int, tmp_path: Path
) -> None:
    own = {
        "embedding_length": 96,
        "attention.head_count": 4,
        "attention.key_length": 32,
        "attention.sliding_window": 16,
    }
    for num_layers, scaled_by in ((layers, 24), (layers - 1, 32)):
        given = own | {"block_count": num_layers}
        metadata = {f"{name}.{key}": value for key, value in given.items()}
        config = gguf_config(_file(tmp_path, {"general.architecture": name} | metadata))
        assert config["query_pre_attn_scalar"] == scaled_by
    less = {"general.architecture": name, f"{name}.block_count": layers}
    assert gguf_config(_file(tmp_path, less))["query_pre_attn_scalar"] is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"general.architecture": "mamba"}, "general.architecture 'mamba' is not supported; supp"),
        ({"llama.feed_forward_length": [1, 2]}, "intermediate_size differs between layers"),
        ({"llama.attention.value_length": 8}, "value_length differs from the keys' 16"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.x": 1}, "rope.scaling.x is not"),
        (
            {"general.architecture": "mistral3", "mistral3.attention.temperature_scale": 0.1},
            "attention.temperature_scale needs rope.scaling.type yarn",
        ),
    ],
)
def test_unsupported_metadata_is_refused(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        gguf_config(_file(tmp_path, LLAMA | changes))


def test_every_end_token(tmp_path: Path) -> None:
    metadata = LLAMA | {
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "<|eot_id|>", "<|im_end|>"],
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 1],  # the last one is an ordinary word
        "general.sampling.temp": 0.1,
        "general.sampling.top_k": 64,
        "general.sampling.penalty_repeat": 1.1,
    }
    assert gguf_generation_config(_file(tmp_path, metadata)) == {
        "eos_token_id": [2, 3],
        "temperature": 0.1,
        "top_k": 64,
        "repetition_penalty": 1.1,
    }
    assert gguf_generation_config(_file(tmp_path, {})) == {}


def test_a_message_of_gpt_oss_does_not_end_its_answer(tmp_path: Path) -> None:
    words = ["<|return|>", "<|end|>", "<|call|>", "<|endoftext|>", "a"]
    metadata = LLAMA | {
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": [3, 3, 3, 3, 1],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.eot_token_id": 1,
    }
    assert gguf_generation_config(_file(tmp_path, metadata)) == {"eos_token_id": [0, 3, 2]}
    words[2] = "<|user|>"  # Phi
    assert gguf_generation_config(_file(tmp_path, metadata)) == {"eos_token_id": [0, 1, 3]}
