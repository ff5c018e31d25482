"""Tiny random models of every type that runs in transformers' code.

Sizes are set by the names that configurations share; WITH has what single types need.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from quire.tests.tiny_models import randomize

VOCAB_SIZE, CONTEXT, WINDOW, HEAD_DIM = 320, 256, 8, 16
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": CONTEXT,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "n_shared_experts": 1,
    "moe_layer_start_index": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # names of GPT-2 and of ministral
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": CONTEXT,
    "n_inner": 64,
    "ffn_hidden_size": 64,
    "ffn_dim": 64,
    "word_embed_proj_dim": 64,
}
# null in the default configuration, and still set
OPTIONAL = {"head_dim", "sliding_window", "num_key_value_heads"}
WITH: dict[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
}


def make_tiny_fallback(model_type: str, **overrides: Any) -> Any:
    """transformers' configuration of a tiny model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    default = kind().to_dict()
    names = getattr(kind, "attribute_map", {})
    sizes = {
        key: value
        for key, value in SIZES.items()
        if key in default and key not in names and (default[key] is not None or key in OPTIONAL)
    }
    if "layer_types" in default:
        sizes["layer_types"] = None
    return kind(**{**sizes, **WITH.get(model_type, {}), **overrides})


def save_tiny_fallback(directory: Path, model_type: str, seed: int = 0, **overrides: Any) -> Any:
    """Saves a checkpoint and returns its model, which computes attention and experts eagerly."""
    import torch
    from transformers import logging
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    logging.disable_progress_bar()
    config = make_tiny_fallback(model_type, **overrides)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    randomize(model, seed)
    model.save_pretrained(directory)
    return model.eval()
