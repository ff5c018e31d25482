"""Decoders with recurrent mixers give transformers' logits, whole and in chunks, for several
requests in a step.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.executor.models import find_model
from quire.executor.models.decoder import Decoder
from quire.executor.models.layers import LayerFactory
from quire.executor.weights.loader import load_weights
from quire.ipc.models.architectures import ARCHITECTURES
from quire.kernels import registry
from quire.kernels.metadata import AttentionMetadata, StateRows

BLOCK_SIZE, NUM_BLOCKS, LENGTHS = 16, 8, (80, 67)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3_next", {}),
    "qwen3-next-every-other": (
        "qwen3_next",
        {"layer_types": None, "full_attention_interval": 2, "attention_bias": True},
    ),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5-tied": (
        "qwen3_5_text",
        {"tie_word_embeddings": True, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 2},
    ),
    "qwen3.5-moe": ("qwen3_5_moe_text", {}),
    "lfm2": ("lfm2", {}),
    "lfm2-bias": (
        "lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-moe": ("lfm2_moe", {}),
    "lfm3": ("lfm3", {}),
    "kimi-linear": ("kimi_linear", {}),
    "kimi-linear-query-rank": (
        "kimi_linear",
        {"q_lora_rank": 24, "linear_conv_kernel_dim": 3, "attention_bias": True},
    ),
}


def load(directory: Path) -> Decoder:
    """Load a checkpoint in fp32, with memory for two requests, where each place has garbage."""
    hf_config = json.loads((directory / "config.json").read_text())
    found = find_model(hf_config)
    config = found.parse_config(hf_config)
    ops = registry.select(
        "cpu", torch.float32, head_dim=config.head_dim, num_kv_heads=config.num_key_value_heads
    )
    make = LayerFactory(ops, torch.float32, torch.device("cpu"))
    model: Decoder = found.build(config, make, 256)
    load_weights(model, directory, lambda *_: None, make.fill)
    for layer in model.attention_layers():
        shape = 2, len(LENGTHS) * NUM_BLOCKS, BLOCK_SIZE, layer.num_kv_heads, layer.head_dim
        key, value = torch.zeros(shape)
        layer.bind_cache(key, value, 0)
    layers = model.state_layers()
    assert tuple(layer.state_parts for layer in layers) == config.state_parts
    for layer in layers:
        layer.bind_states([torch.full((3, *part.shape), 7.0) for part in layer.state_parts])
    return model


@torch.inference_mode()
def run(model: Decoder, prompts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    """Compute the logits of every token, in steps of at most `chunk` tokens of each prompt."""
    done, logits = [0] * len(prompts), [torch.empty(0)] * len(prompts)
    while rows := [row for row, prompt in enumerate(prompts) if done[row] < len(prompt)]:
        counts = [min(chunk, len(prompts[row]) - done[row]) for row in rows]
        ends = [done[row] + count for row, count in zip(rows, counts)]
        positions = [torch.arange(done[row], end) for row, end in zip(rows, ends)]
        first_slots = [row * NUM_BLOCKS * BLOCK_SIZE for row in rows]
        none = torch.full((len(rows),), -1)
        metadata = AttentionMetadata(
            torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor(ends, dtype=torch.int32),
            torch.stack([torch.arange(NUM_BLOCKS) + row * NUM_BLOCKS for row in rows]).int(),
            torch.cat([own + first for own, first in zip(positions, first_slots)]),
            0,
            counts,
            ends,
            states=StateRows(
                torch.tensor([2 - row for row in rows], dtype=torch.int32),
                torch.tensor(ends) - 1,
                none,
                none.int(),
            ),
        )
        tokens = [prompts[row][done[row] : end] for row, end in zip(rows, ends)]
        hidden = model(torch.tensor(sum(tokens, [])), torch.cat(positions), metadata)
        for row, own in zip(rows, model.compute_logits(hidden).split(counts)):
            logits[row] = torch.cat([logits[row], own])
        for row, end in zip(rows, ends):
            done[row] = end
    return logits


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tiny: Any, oracle: Any) -> None:
    kind, overrides = VARIANTS[variant]
    directory = tiny(kind, **overrides)
    model = load(directory)
    prompts = [random.Random(length).choices(range(256), k=length) for length in LENGTHS]
    whole = run(model, prompts, 100)
    for prompt, found in zip(prompts, whole, strict=True):
        with torch.inference_mode():
            expected = oracle(directory)(torch.tensor([prompt])).logits[0]
        # a tied head has logits up to 70
        torch.testing.assert_close(found, expected, rtol=0, atol=max(1e-4, 1e-5 * found.max()))
    for chunk in (1, 33):
        for found, expected in zip(run(model, prompts, chunk), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_layers_are_those_of_the_kinds(tiny: Any) -> None:
    model = load(tiny("lfm3"))
    assert [layer.sliding_window for layer in model.attention_layers()] == [24, 0]
    assert [layer.self_attn is None for layer in model.layers] == [True, False, False, True]
    assert model.config.cache_windows == (24, 0)
    assert model.config.state_bytes(2) == 2 * 6 * 64 * 2


@pytest.mark.parametrize("architecture", ["Qwen3_5ForCausalLM", "Lfm2ForCausalLM"])
def test_published_names_of_sizes(architecture: str) -> None:
    """Of Qwen3.5-27B and LFM2-1.2B."""
    common = {"vocab_size": 65_536, "max_position_embeddings": 128_000}
    if architecture == "Lfm2ForCausalLM":
        given = common | {
            "hidden_size": 2048,
            "block_ff_dim": 12_288,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "tie_embedding": True,
        }
        config = ARCHITECTURES[architecture].parse(given)
        assert (config.intermediate_size, config.head_dim) == (8192, 64)
        assert config.cache_layers == (2, 5, 8, 10, 12, 14)
        assert config.state_bytes(2) == 10 * 8 * 2**10
        return
    given = common | {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }
    config = ARCHITECTURES[architecture].parse(given)
    assert config.cache_layers == tuple(range(3, 64, 4))
    assert config.rope["partial_rotary_factor"] == 0.25
    assert config.state_bytes(2) == 48 * (3 * 2**20 + 60 * 2**10)
