"""Shapes of the models that bench_gpu.py measures, as keys of a config.json, and what a token of
them costs at least.
"""

from typing import Any, NamedTuple

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
    },
}
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
    "conv_L_cache": 3,
    "conv_bias": False,
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
}


def shape(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate: int,
    vocab: int,
    tied: bool,
    **more: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        **more,
    }


SHAPES = {
    "tiny": shape(64, 2, 4, 2, 16, 128, 512, True),
    "0.5B": shape(896, 24, 14, 2, 64, 4864, 151936, True),
    "0.6B": shape(1024, 28, 16, 8, 128, 3072, 151936, True, **QWEN3),
    "1.5B": shape(1536, 28, 12, 2, 128, 8960, 151936, True),
    "7B": shape(3584, 28, 28, 4, 128, 18944, 152064, False),
    "Qwen3.5-0.8B": shape(1024, 24, 8, 2, 256, 3584, 248320, True, **QWEN3_5),
    "LFM2-1.2B": shape(2048, 16, 32, 8, 64, 8192, 65536, True, **LFM2),
}


class Cost(NamedTuple):
    """What a model's layers have, all together."""

    weights: int  # of the layers, without embedding and head
    num_attention_layers: int
    state_bytes: int  # of a request, read and written once per step


def cost(model: str) -> Cost:
    s = SHAPES[model]
    hidden = s["hidden_size"]
    types = s.get("layer_types", ["full_attention"] * s["num_hidden_layers"])
    # the gates of Qwen3.5's attention are as wide as its queries
    num_wide = 3 if s.get("model_type") == "qwen3_5_text" else 2
    attention = num_wide * s["num_attention_heads"] + 2 * s["num_key_value_heads"]
    weights = {"full_attention": hidden * attention * s["head_dim"], "conv": 4 * hidden * hidden}
    states = {"full_attention": 0, "conv": 2 * hidden * 2}
    if "linear_num_value_heads" in s:
        heads, size = s["linear_num_value_heads"], s["linear_value_head_dim"]
        keys = s["linear_num_key_heads"] * s["linear_key_head_dim"]
        weights["linear_attention"] = hidden * (2 * keys + 3 * heads * size + 2 * heads)
        recurrent = 4 * heads * size * s["linear_key_head_dim"]
        states["linear_attention"] = recurrent + 3 * 2 * (2 * keys + heads * size)
    return Cost(
        sum(weights[kind] for kind in types) + len(types) * 3 * hidden * s["intermediate_size"],
        types.count("full_attention"),
        sum(states[kind] for kind in types),
    )
