"""Shapes of the models that bench_gpu.py measures, as keys of a config.json."""

from typing import Any

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


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
}
