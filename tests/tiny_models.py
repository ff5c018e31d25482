"""Tiny random checkpoints, saved by transformers: weights, config and a small tokenizer.

Tests that use them need no download.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# vocabulary of the model; the tokenizer uses fewer ids, as with padded vocabularies
VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 302  # <|im_end|>
# what makes of "gemma4_text" a model as 26B-A4B
GEMMA4_EXPERTS = {
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
# Enough merges for tokens of several bytes, for a token with a leading space, and for parts of
# multi-byte characters.
_MERGES = (
    "Ġ t|h e|Ġt he|i n|e r|a n|Ġ a|r e|o n|Ġ w|o u|Ġ s|e n|Ġ o|o r|a t|i s|Ġ c|Ġ b|e s|i t|Ġ f|n "
    "d|an d|e d|in g|Ġa nd|Ġ m|Ġo f|Ġ p"
    "|l l|a r|Ġ h|ou t"
    "|Ġ in|Ġ d|a l|o m|a s|ä ½|ä½ ł|å ¥"
)

TINY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 300,
    "eos_token_id": EOS_TOKEN_ID,
}
LATENTS = {  # of multi-head latent attention, with a mixture of experts
    "q_lora_rank": 48,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
_INDEXER = {"index_head_dim": 32, "index_n_heads": 4}
KINDS = (
    *("qwen2", "qwen3", "llama", "mistral", "gemma3_text", "phi3", "smollm3", "olmo2", "olmo3"),
    *("granite", "ministral3", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"),
    *("granitemoehybrid", "falcon_h1", "bamba", "nemotron_h", "mamba2", "gemma4_text"),
    "gemma3n_text",
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "lfm3"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear"),
    *("deepseek_v32", "glm_moe_dsa"),
    *("glm4_moe", "seed_oss", "ernie4_5", "ernie4_5_moe", "exaone4", "gemma2", "glm4"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "bitnet"),
)
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
    "pad_token_id": 0,
}
_MIXER, _ATTENTION = "linear_attention", "full_attention"
_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}
_HYBRID_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
_CONV = {"num_hidden_layers": 4, "norm_eps": 1e-5, "rms_norm_eps": 1e-5}


_OF_KIND: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "llama": {"rms_norm_eps": 1e-5},
    "mistral": {"sliding_window": 24},
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": 24,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 24,
    },
    "phi3": {"rms_norm_eps": 1e-5, "pad_token_id": 0},
    "smollm3": {"no_rope_layer_interval": 2, "pad_token_id": 0},
    "olmo2": {},
    "olmo3": {
        "sliding_window": 24,
        "layer_types": None,
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.7,
    },
    "ministral3": {"head_dim": 16, "pad_token_id": 0},
    "mixtral": {"rms_norm_eps": 1e-5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 80,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "gpt_oss": {
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 24,
        "swiglu_limit": 0.9,
        "pad_token_id": 0,
    },
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": [_MIXER, _ATTENTION, _MIXER],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 80,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.2,
        "logits_scaling": 0.7,
    },
    "falcon_h1": {
        **_MAMBA,
        "mamba_n_heads": 6,
        "mamba_d_ssm": 96,
        "head_dim": 24,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.8,
        "key_multiplier": 0.7,
        "attention_out_multiplier": 0.9,
        "mlp_multipliers": [0.9, 0.8],
        "ssm_multipliers": [0.6, 0.7, 0.8, 0.9, 1.1],
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.7,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "nemotron_h": {
        "layers_block_type": [_MIXER, "moe", _ATTENTION, "mlp", _MIXER],
        "head_dim": 24,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "time_step_min": 1e-30,  # transformers would clamp steps, in prefill alone
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 80,
        "moe_latent_size": 32,
        "routed_scaling_factor": 1.5,
        "pad_token_id": 0,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 8,
        "residual_in_fp32": False,
        "n_groups": 2,
        "pad_token_id": 0,
    },
    "qwen3_next": _HYBRID | _HYBRID_EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": _HYBRID | _HYBRID_EXPERTS | {"intermediate_size": None},
    "lfm2": _CONV
    | {
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "block_multiple_of": 8,
        "pad_token_id": 0,
    },
    "lfm2_moe": _CONV
    | {
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
        "pad_token_id": 0,
    },
    "lfm3": _CONV
    | {
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "head_dim": 24,
        "sliding_window": 24,
        "pad_token_id": 0,
    },
    "glm4_moe": {
        "head_dim": 16,
        "use_qk_norm": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.4,
        "pad_token_id": 0,
    },
    "seed_oss": {"head_dim": 24, "pad_token_id": 0},
    "ernie4_5": {"head_dim": 16},
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 32,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 0,
    },
    "hunyuan_v1_dense": {"head_dim": 24, "rms_norm_eps": 1e-5, "pad_token_id": 0},
    "hunyuan_v1_moe": {
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "num_experts": 6,
        "moe_topk": 2,
        "pad_token_id": 0,
    },
    # caps that the tiny model's logits reach
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 24,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 12.0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "glm4": {"head_dim": 32, "pad_token_id": 0},
    "exaone4": {"head_dim": 16, "sliding_window": 24, "sliding_window_pattern": 2},
    "bitnet": {"rms_norm_eps": 1e-5, "pad_token_id": 0},
    "deepseek_v2": {
        **LATENTS,
        "q_lora_rank": None,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "routed_scaling_factor": 1.7,
    },
    "deepseek_v3": {
        **LATENTS,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "glm4_moe_lite": {**LATENTS, "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "deepseek_v32": {
        **LATENTS,
        **_INDEXER,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "glm_moe_dsa": {
        **LATENTS,
        **_INDEXER,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "indexer_types": ["full", "shared", "full"],
    },
    "kimi_linear": {
        **{key: LATENTS[key] for key in LATENTS if key != "q_lora_rank"},
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "linear_head_dim": 16,
        "linear_num_heads": 6,
        "layer_types": [_MIXER, _MIXER, _ATTENTION, _MIXER],
        "pad_token_id": 0,
    },
    # four layers with keys and values, two that share them; two sparse ones; a table of inputs that
    # lacks the last tokens
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "head_dim": 16,
        "sliding_window": 24,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96, 96, 96, 96, 128, 128],
        "activation_sparsity_pattern": [0.8, 0.0, 0.0, 0.6, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 290,
        "laurel_rank": 12,
        "final_logit_softcapping": 15.0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    # as in E2B: four layers with keys and values, two that share them, inputs of each layer
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 24,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 15.0,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
}


def make_tiny_config(kind: str, **overrides: Any):
    """Make transformers' config of a tiny model of `kind`; `overrides` are keys of config.json."""
    from transformers import AutoConfig

    per_kind = _OF_KIND[kind]
    keys = {**TINY, **per_kind, **overrides}
    if "num_hidden_layers" in overrides and per_kind.get("layer_types"):
        keys["layer_types"] = per_kind["layer_types"][: keys["num_hidden_layers"]]
    return AutoConfig.for_model(kind, **keys)


def save_tiny_model(
    directory: str | Path,
    kind: str = "qwen2",
    *,
    seed: int = 0,
    dtype: str = "float32",
    num_shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write a checkpoint and return its directory.

    The files are config.json, generation_config.json, safetensors, tokenizer.json and
    tokenizer_config.json. All parameters are random, including biases and norms, with a spread wide
    enough that greedy choices do not tie. `num_shards` > 1 splits the weights over about that many
    files with an index. `overrides` are keys of config.json.
    """
    import torch
    from transformers import AutoModelForCausalLM, logging

    directory = Path(directory)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(make_tiny_config(kind, **overrides))
    randomize(model, seed)
    model.to(getattr(torch, dtype))
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(
        directory, max_shard_size=2 * num_bytes if num_shards == 1 else num_bytes // num_shards
    )
    model.generation_config.save_pretrained(directory)
    save_tiny_tokenizer(directory)
    return directory


def save_tiny_multimodal_model(directory: str | Path, kind: str, **overrides: Any) -> Path:
    """Write a random checkpoint of "gemma3", "mistral3", "qwen3_5" or "qwen3_5_moe", with a text
    part of the tiny sizes.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText, logging

    logging.disable_progress_bar()
    vision = {
        "model_type": {
            "gemma3": "siglip_vision_model",
            "mistral3": "pixtral",
            "qwen3_5": "qwen3_5_vision",
            "qwen3_5_moe": "qwen3_5_moe_vision",
        }[kind],
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
        "image_size": 28,
        "patch_size": 14,
    }
    if kind.startswith("qwen3_5"):
        vision = {
            "model_type": vision["model_type"],
            "hidden_size": 32,
            "intermediate_size": 32,
            "depth": 1,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
        }
    text = {"gemma3": "gemma3_text", "mistral3": "ministral3"}.get(kind, f"{kind}_text")
    config = AutoConfig.for_model(
        kind, text_config=make_tiny_config(text).to_dict(), vision_config=vision, **overrides
    )
    model = AutoModelForImageTextToText.from_config(config)
    randomize(model.model.language_model, 0)
    model.save_pretrained(directory)
    save_tiny_tokenizer(directory)
    return Path(directory)


def randomize(model, seed: int) -> None:
    """Fill every parameter from `seed`, and the biases that choose experts.

    Standard deviations: 1.6 / sqrt(inputs) for matrices, 1 for embeddings, 0.3 for biases. Norms
    and factors are around 1.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        ends = "correction_bias", "expert_bias", "layer_scalar"
        buffers = (pair for pair in model.named_buffers() if pair[0].endswith(ends))
        for name, parameter in [*model.named_parameters(), *buffers]:
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or name.endswith(("scale", "scalar")):
                parameter.copy_(1.0 + 0.2 * noise)
            elif name.endswith(
                ("linear_attn.A_log", "forget_gate.A_log")
            ):  # states last for tens of tokens
                parameter.copy_(0.3 * noise - 3.0)
            elif parameter.dim() == 1 or name.endswith("correction_bias"):
                parameter.copy_(0.3 * noise)
            elif "embed" in name:
                parameter.copy_(noise)
            else:  # experts have a dimension more
                parameter.copy_(noise * (1.6 / parameter.shape[-1] ** 0.5))


def save_tiny_tokenizer(directory: str | Path) -> None:
    """Save a byte-level BPE tokenizer: 256 bytes, a few merges, three special tokens, ChatML.

    Every text round-trips.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    merges = [tuple(pair.split(" ")) for pair in _MERGES.split("|")]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + list(
        dict.fromkeys("".join(pair) for pair in merges)
    )
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    while tokenizer.get_vocab_size() < 300:  # the special ids do not depend on the number of merges
        tokenizer.add_tokens(
            [AddedToken(f"<|unused{tokenizer.get_vocab_size()}|>", normalized=False)]
        )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    assert tokenizer.token_to_id("<|im_end|>") == EOS_TOKEN_ID
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": TINY["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
