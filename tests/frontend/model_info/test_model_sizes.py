"""Sizes computed from config.json equal those of the layers, for every architecture of the
executor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quire.executor import models
from quire.executor.models.layers import LayerFactory
from quire.frontend.model_info import model_sizes
from quire.frontend.model_info.model_sizes import (
    DTYPE_BYTES,
    kv_bytes_per_token,
    measure_model,
)
from quire.ipc.models.memory_plan import QUANTIZATION_BITS
from quire.kernels import registry
from quire.kernels.ops import kv_cache_row
from quire.tests.ipc.models.test_encoders import FAMILIES, config_of
from quire.tests.tiny_models import GEMMA4_EXPERTS, KINDS, make_tiny_config

VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True},
    {"attention_bias": True, "use_sliding_window": True, "max_window_layers": 1},
    {"num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 333},
]
CASES = [
    (kind, variant)
    for kind in KINDS
    for variant in VARIANTS
    if kind in "qwen2 qwen3" or "attention_bias" not in variant
    if kind not in ("gemma3n_text", "gemma4_text") or "num_hidden_layers" not in variant
] + [("llama", {"mlp_bias": True, "head_dim": 10}), ("gemma4_text", GEMMA4_EXPERTS)]


@pytest.mark.parametrize(("kind", "variant"), CASES)
def test_sizes_equal_those_of_the_layers(kind: str, variant: dict[str, Any]) -> None:
    hf_config = make_tiny_config(kind, **variant).to_dict()
    hf_config["architectures"] = None  # model_type names it
    found = models.find_model(hf_config)
    ops = registry.select("cpu", torch.bfloat16)
    model = found.build(
        found.parse_config(hf_config),
        LayerFactory(ops, torch.bfloat16, torch.device("cpu")),
        64,
    )
    sizes = measure_model(hf_config)
    assert sizes.config == found.parse_config(hf_config)
    assert sizes.num_parameters == sum(tensor.numel() for _, tensor in model.weights())
    assert sizes.weights_bytes("bfloat16") == sum(tensor.nbytes for _, tensor in model.weights())
    for quantization in (None, *QUANTIZATION_BITS):
        make = LayerFactory(ops, torch.bfloat16, torch.device("cpu"), quantization)
        found.build(found.parse_config(hf_config), make, 64)
        assert sizes.weights_bytes("bfloat16", quantization) == make.weights_bytes
    for kv_cache_dtype, dtype in {
        "auto": torch.bfloat16,
        "fp8": torch.float8_e4m3fn,
        "int8": torch.int8,
    }.items():
        rows = [
            (1 + layer.has_values) * layer.num_kv_heads * kv_cache_row(layer.head_dim, dtype)
            for layer in model.attention_layers()
        ]
        assert (
            kv_bytes_per_token(sizes.config, "bfloat16", kv_cache_dtype)
            == sum(rows) * dtype.itemsize
        )


POOLING = [
    *((kind, form) for kind in FAMILIES for form in ("Model", "ForSequenceClassification")),
    *(("qwen3", f"Qwen3{form}") for form in ("Model", "ForSequenceClassification")),
    ("gemma3_text", "Gemma3TextModel"),
]


@pytest.mark.parametrize(("kind", "form"), POOLING)
def test_sizes_of_models_that_pool_equal_those_of_the_layers(kind: str, form: str) -> None:
    if kind in FAMILIES:
        hf_config = config_of(kind, form, num_labels=3)
    else:
        hf_config = make_tiny_config(kind).to_dict() | {"architectures": [form]}
    found = models.find_model(hf_config)
    ops, sizes = registry.select("cpu", torch.bfloat16), measure_model(hf_config)
    for quantization in (None, *QUANTIZATION_BITS):
        make = LayerFactory(ops, torch.bfloat16, torch.device("cpu"), quantization)
        model = found.build(found.parse_config(hf_config), make, 64)
        assert sizes.weights_bytes("bfloat16", quantization) == make.weights_bytes
    assert sizes.num_parameters == sum(tensor.numel() for _, tensor in model.weights())
    if kind in FAMILIES:
        assert kv_bytes_per_token(sizes.config, "bfloat16") == 0


def test_bytes_of_a_type_equal_torchs() -> None:
    assert {name: getattr(torch, name).itemsize for name in DTYPE_BYTES} == DTYPE_BYTES


@pytest.mark.parametrize(
    # sizes: hidden, intermediate, layers, heads, KV heads, vocabulary
    ("architecture", "sizes", "tied", "published"),
    [
        ("Qwen2ForCausalLM", (896, 4864, 24, 14, 2, 151_936), True, 494_032_768),  # Qwen2.5-0.5B
        ("Qwen3ForCausalLM", (4096, 12_288, 36, 32, 8, 151_936), False, 8_190_735_360),  # Qwen3-8B
        ("LlamaForCausalLM", (2048, 8192, 16, 32, 8, 128_256), True, 1_235_814_400),  # Llama-3.2-1B
        # Llama-3.1-8B
        ("LlamaForCausalLM", (4096, 14_336, 32, 32, 8, 128_256), False, 8_030_261_248),
    ],
)
def test_parameters_of_well_known_models(
    architecture: str, sizes: tuple[int, ...], tied: bool, published: int
) -> None:
    keys = (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    hf_config = dict(zip(keys, sizes, strict=True)) | {
        "architectures": [architecture],
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
    }
    assert measure_model(hf_config).num_parameters == published


def test_the_assumptions_about_kernels_hold() -> None:
    pytest.importorskip("triton")
    from quire.kernels.triton import attention_decode, top_k_top_p

    assert (
        model_sizes.SAMPLING_ROW_BYTES == 2 * top_k_top_p.CAPACITY * 8
        and model_sizes.ATTENTION_PIECES == attention_decode.MAX_PIECES
    )
