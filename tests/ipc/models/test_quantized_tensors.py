"""The tensors of quantized checkpoints by the headers alone: types, shapes, bytes in memory."""

from __future__ import annotations

import pytest
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.quantization_config import WeightFormat, parse_quantization
from quire.ipc.models.quantized_tensors import (
    BLOCKS,
    packed_type,
    parts_of,
    saved_bytes,
    stored_parts,
)
from quire.kernels.reference.gguf_blocks import block_type

AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
SHAPES = {
    "model.embed_tokens.weight": [100, 256],
    "model.layers.0.self_attn.q_proj.weight": [256, 256],
    "model.layers.0.self_attn.k_proj.weight": [64, 256],
    "model.layers.0.self_attn.v_proj.weight": [64, 256],
    "model.layers.0.self_attn.q_proj.bias": [256],
    "model.layers.0.mlp.down_proj.weight": [256, 512],
    "model.norm.weight": [256],
}


def test_names_and_shapes():
    parts = parts_of(SHAPES, parse_quantization(AWQ))
    down = {name: part for name, part in parts.items() if "down" in name}
    assert {name: (part.dtypes[0], part.shapes) for name, part in down.items()} == {
        "model.layers.0.mlp.down_proj.qweight": ("I32", ([512, 32],)),
        "model.layers.0.mlp.down_proj.qzeros": ("I32", ([4, 32],)),
        "model.layers.0.mlp.down_proj.scales": ("F32", ([4, 256],)),
    }
    assert len(parts) == 12 and parts_of(SHAPES, None) == {}


@pytest.mark.parametrize(
    ("found", "shape", "message"),
    [
        (WeightFormat("awq", 4, group_size=128), [8, 192], "192 columns, not a multiple of"),
        (WeightFormat("awq", 4), [12, 64], "does not fill words of 8 numbers"),
        (WeightFormat("gptq", 4), [8, 12], "does not fill words of 8 numbers"),
        (WeightFormat("packed", 4), [8, 9], "which are not pairs"),
    ],
)
def test_shapes_that_a_format_cannot_have(found, shape, message):
    with pytest.raises(ModelLoadError, match=f"model.a.weight .*{message}"):
        stored_parts("model.a.weight", shape, found)


@pytest.mark.parametrize(
    ("found", "columns", "expected"),
    [
        (WeightFormat("awq", 4, group_size=128), 256, "INT4_128"),
        (WeightFormat("awq", 4, group_size=64), 256, "INT4_32"),
        (WeightFormat("awq", 4, group_size=96), 288, "INT4_32"),
        (WeightFormat("awq", 4, group_size=16), 256, None),
        (WeightFormat("gptq", 4), 256, "INT4_128"),
        (WeightFormat("gptq", 4), 192, "INT4_32"),
        (WeightFormat("plain", 8), 64, "Q8_0"),
        (WeightFormat("plain", 8), 40, None),
        (WeightFormat("plain", 8, is_float=True), 256, "FP8_128"),
        (WeightFormat("plain", 8, is_float=True, group_rows=0), 96, "FP8_32"),
        (WeightFormat("plain", 8, is_float=True, group_rows=64, group_size=64), 256, "FP8_32"),
        (WeightFormat("plain", 8, is_float=True, group_rows=128, group_size=128), 320, "FP8_32"),
        (WeightFormat("plain", 8, is_float=True), 40, None),
    ],
)
def test_the_type_of_the_blocks(found, columns, expected):
    assert packed_type(found, columns, keeps_fp8=True) == expected
    if found.is_float:
        assert packed_type(found, columns) is None


def test_sizes_of_blocks():
    for name, (columns, num_bytes) in BLOCKS.items():
        assert block_type(name)[:2] == (columns, num_bytes)


def test_bytes_in_memory():
    quantization = parse_quantization(AWQ)
    assert quantization is not None
    numbers = (256 + 64 + 64) * 256 + 256 * 512
    saved = numbers * 2 - numbers // 128 * 68
    assert saved_bytes(SHAPES, quantization, 2) == saved


def test_a_merged_layer_is_packed_if_all_of_it_is():
    ignored = AWQ["quantization_config"] | {"modules_to_not_convert": ["v_proj"]}
    quantization = parse_quantization({"quantization_config": ignored})
    assert quantization is not None
    saved = 256 * 512 * 2 - 256 * 512 // 128 * 68
    assert saved_bytes(SHAPES, quantization, 2) == saved
