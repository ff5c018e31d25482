"""Writes a GGUF file of a known shape with random weights: in F16 for llama.cpp's llama-quantize,
or as random blocks of a type.

python tests/bench/make_gguf.py 0.5B OUT.gguf
llama-quantize OUT.gguf OUT-Q4_K_M.gguf Q4_K_M
python tests/bench/make_gguf.py 1.5B OUT-Q4_K.gguf --type Q4_K

0.5B-layer is one layer of Qwen2.5-0.5B with a vocabulary of 8,192, for which its head is about as
large a part as the whole model's. 0.5B-layers is five of them.
Mixtures of experts are 30B-A3B-layers, four layers of Qwen3-30B-A3B, and 30B-A3B-small, a sixteenth
of its parameters; both with a vocabulary of 32,000, so that the head does not take most of a step.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import gguf
import numpy as np
from quire.tests.bench.gpu_shapes import SHAPES, shape
from quire.tests.kernels.case import random_blocks
from transformers.convert_slow_tokenizer import bytes_to_unicode

EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
LAYERS = {
    "0.5B-layer": shape(896, 1, 14, 2, 64, 4864, 8192, True),
    "0.5B-layers": shape(896, 5, 14, 2, 64, 4864, 8192, True),
}
MIXTURES = {
    "30B-A3B-layers": shape(2048, 4, 32, 4, 128, 768, 32_000, True, **EXPERTS),
    "30B-A3B-small": shape(1024, 9, 16, 2, 128, 512, 32_000, True, **EXPERTS),
}


def tensors(shape: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Qwen2 or Qwen3-MoE model with a tied head."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim, experts = shape["head_dim"], shape.get("num_experts")
    yield "token_embd.weight", (shape["vocab_size"], hidden)
    for i in range(shape["num_hidden_layers"]):
        for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            yield f"blk.{i}.attn_{name}.weight", (rows * head_dim, hidden)
            if not experts:
                yield f"blk.{i}.attn_{name}.bias", (rows * head_dim,)
        if experts:
            yield f"blk.{i}.attn_q_norm.weight", (head_dim,)
            yield f"blk.{i}.attn_k_norm.weight", (head_dim,)
            yield f"blk.{i}.ffn_gate_inp.weight", (experts, hidden)
        yield f"blk.{i}.attn_output.weight", (hidden, heads * head_dim)
        yield f"blk.{i}.attn_norm.weight", (hidden,)
        yield f"blk.{i}.ffn_norm.weight", (hidden,)
        suffix, stack = ("_exps", (experts,)) if experts else ("", ())
        yield f"blk.{i}.ffn_gate{suffix}.weight", (*stack, inner, hidden)
        yield f"blk.{i}.ffn_up{suffix}.weight", (*stack, inner, hidden)
        yield f"blk.{i}.ffn_down{suffix}.weight", (*stack, hidden, inner)
    yield "output_norm.weight", (hidden,)


def write(shape: dict, path: str, type: str | None = None) -> None:
    """`type`: of the blocks of matrices; a type of llama.cpp's. None: F16."""
    experts = shape.get("num_experts")
    writer = gguf.GGUFWriter(path, "qwen3moe" if experts else "qwen2", use_temp_file=True)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(shape["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(shape["intermediate_size"])
        writer.add_key_length(shape["head_dim"])
        writer.add_value_length(shape["head_dim"])
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    tokens = list(bytes_to_unicode().values()) + ["Ġa", "<|end|>"]
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL]
    writer.add_eos_token_id(len(tokens) - 1)
    missing = shape["vocab_size"] - len(tokens)
    writer.add_token_list(tokens + [f"[token {i}]" for i in range(missing)])
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * missing)
    writer.add_token_merges(["Ġ a"])
    random = np.random.default_rng(0)
    for name, size in tensors(shape):
        if type and len(size) > 1 and "gate_inp" not in name:
            blocks = random_blocks(math.prod(size[:-1]), size[-1], type).numpy()
            stored = gguf.GGMLQuantizationType[type]
            writer.add_tensor(name, blocks.reshape(*size[:-1], -1), raw_dtype=stored)
            continue
        if "norm" in name:
            values = np.ones(size, np.float32)
        else:
            values = random.standard_normal(size, np.float32) * np.float32(0.02)
        # vectors and routers are F32 in every file that llama.cpp writes
        is_float = values.ndim == 1 or "gate_inp" in name
        writer.add_tensor(name, values if is_float else values.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = {name: of for name, of in SHAPES.items() if is_tied_qwen2(of)} | LAYERS | MIXTURES
    parser.add_argument("shape", choices=shapes)
    parser.add_argument("path", help="the file to write")
    parser.add_argument("--type", help="random blocks of this type, such as Q4_K, not F16")
    args = parser.parse_args()
    write(shapes[args.shape], args.path, args.type)


def is_tied_qwen2(shape: dict) -> bool:
    return shape["tie_word_embeddings"] and "architectures" not in shape


if __name__ == "__main__":
    main()
