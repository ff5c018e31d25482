"""Linear layers on GGUF's blocks on each instruction set: the reference's bits whatever rows are
computed together, and the dequantized rows as embeddings.
"""

from __future__ import annotations

import pytest
import torch
from quire.kernels.cpu.native.library import library
from quire.kernels.moe import Experts
from quire.kernels.ops import silu_and_mul
from quire.kernels.reference.gguf_blocks import block_type
from quire.kernels.reference.gguf_linear import TYPES, GgufLinear
from quire.tests.kernels.cases import random_blocks
from quire.tests.kernels.moe_cases import random_ids
from quire.tests.kernels.native.conftest import NEEDS_LIBRARY
from quire.tests.kernels.native.test_quantized import normal, same_bits

if library is not None:
    from quire.kernels.cpu.native import gguf
    from quire.kernels.cpu.native.experts import fused_moe
    from quire.kernels.cpu.native.gguf import PackedGgufLinear

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33)  # few and many rows use different instructions

types = pytest.mark.parametrize("type", TYPES)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def layers(blocks, type, dtype, bias=None):
    return PackedGgufLinear([blocks], [type], bias, dtype), GgufLinear(
        [blocks], [type], bias, dtype
    )


def shapes(type: str) -> list[tuple[int, int]]:
    """out, in"""
    found = [(1, 32), (16, 256), (33, 512), (96, 768), (40, 480), (24, 896), (20, 1184)]
    return [(rows, columns) for rows, columns in found if columns % block_type(type).columns == 0]


@pytest.mark.sampled
@types
@dtypes
def test_the_bits_are_the_references_for_any_number_of_rows_and_threads(isa, type, dtype):
    torch.manual_seed(0)
    for out_features, in_features in shapes(type):
        bias = normal(out_features, dtype=dtype, seed=1)
        layer, reference = layers(random_blocks(out_features, in_features, type), type, dtype, bias)
        x = normal(max(ROWS), in_features, dtype=dtype, seed=2)
        expected, logits = reference(x), reference.logits(x)
        for num_rows in ROWS:
            library.set_num_threads(1 + num_rows % 2)
            assert same_bits(layer(x[-num_rows:]), expected[-num_rows:]), num_rows
            assert same_bits(layer.logits(x[:num_rows]), logits[:num_rows]), num_rows


@types
def test_numbers_at_the_edge_of_their_range(isa, type):
    """All bits set or clear, x of the largest magnitude and any sign: no sum may overflow."""
    scaled = random_blocks(4, 512, type)
    blocks = torch.stack([scaled[0] | 255, scaled[1] & 0, scaled[2], scaled[3]]).repeat(4, 1)
    one = torch.tensor([1.0]).half().view(torch.uint8)
    num_bytes = block_type(type).num_bytes
    by_block = blocks.view(16, -1, num_bytes)
    if type == "MXFP4":
        by_block[..., 0] = 128
    else:
        by_block[..., num_bytes - 2 if type == "Q6_K" else 0 :][..., :2] = one
    if type in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"):
        by_block[..., 2:4] = one
    if type == "Q6_K":
        by_block[0, :, 192:208] = 128  # the scale -128
    if type.startswith("INT4"):  # scales of 1, zeros of 255 and 0
        by_block[..., :4] = torch.tensor([1.0]).view(torch.uint8)
        by_block[::2, :, 0] = 255
    layer, reference = layers(blocks, type, torch.float32)
    signs = torch.tensor([[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0], [0.0, 0.0]]).repeat(1, 256)
    assert same_bits(layer(signs), reference(signs))


@types
def test_embeddings_are_dequantized_rows(isa, type):
    for dtype in (torch.bfloat16, torch.float32):
        layer, reference = layers(random_blocks(40, 512, type), type, dtype)
        token_ids = torch.tensor([39, 0, 17, 16, 17], dtype=torch.int32)
        assert same_bits(layer.embedding(token_ids), reference.embedding(token_ids))
        assert layer.embedding(torch.tensor([40, -1])).isnan().all()


@types
def test_gated(isa, type):
    layer, _ = layers(random_blocks(96, 512, type), type, torch.bfloat16)
    x = normal(9, 512, dtype=torch.bfloat16)
    assert layer.can_gate
    assert same_bits(layer.silu_and_mul(x), silu_and_mul(layer(x)))


@pytest.mark.parametrize("type", ["Q4_0", "Q4_K", "Q6_K"])
def test_experts_give_a_token_the_same_bits_among_few_and_many(isa, type):
    def pack(rows: int) -> list[PackedGgufLinear]:
        return [layers(random_blocks(rows, 256, type), type, torch.bfloat16)[0] for _ in range(4)]

    experts = Experts(pack(512), pack(40), "silu")
    torch.manual_seed(3)
    x, ids, weights = normal(40, 256, dtype=torch.bfloat16), random_ids(40, 4, 2), torch.rand(40, 2)
    many = fused_moe(x, ids, weights, experts)  # 20 rows per expert
    for part in (slice(0, 1), slice(5, 17)):
        assert same_bits(fused_moe(x[part], ids[part], weights[part], experts), many[part])


def test_parts_of_several_types(isa):
    """Their bits are those of layers of their own; neighbours of one type are one part."""
    names = ["Q4_K", "Q4_K", "Q6_K"]
    parts = [random_blocks(rows, 512, type) for rows, type in zip((48, 16, 24), names, strict=True)]
    bias, x = normal(88, dtype=torch.bfloat16), normal(5, 512, dtype=torch.bfloat16)
    layer = PackedGgufLinear(parts, names, bias, torch.bfloat16)
    assert [(part.type, part.rows) for part in layer.parts] == [("Q4_K", 64), ("Q6_K", 24)]
    assert not layer.can_gate
    assert same_bits(layer(x), GgufLinear(parts, names, bias, torch.bfloat16)(x))


@pytest.mark.skipif(library is None, reason=NEEDS_LIBRARY)
@types
def test_memory_equals_the_file(type):
    blocks = random_blocks(64, 1280, type)
    layer, _ = layers(blocks, type, torch.bfloat16)
    assert sum(part.numbers.nbytes + part.scales.nbytes for part in layer.parts) == blocks.nbytes


@types
def test_a_row_that_is_not_finite_gives_nan(isa, type):
    layer, _ = layers(random_blocks(20, 512, type), type, torch.float32)
    x = normal(4, 512, dtype=torch.float32)
    expected = layer(x)
    x[1, 3], x[2, 300] = float("nan"), float("inf")
    assert same_bits(layer(x)[[0, 3]], expected[[0, 3]]) and layer(x)[1:3].isnan().all()


@types
@pytest.mark.skipif(library is None, reason=NEEDS_LIBRARY)
def test_pieces_are_packed_as_a_whole_and_released_once(type, monkeypatch):
    """Several parts, whose pieces begin anywhere in them."""
    columns = 2 * block_type(type).columns
    parts = [random_blocks(rows, columns, type) for rows in (40, 7, 30)]
    whole = PackedGgufLinear(parts, [type] * 3, None, torch.bfloat16).parts[0]
    monkeypatch.setattr(gguf, "_PIECE_BYTES", 33 * parts[0].shape[1])
    released = []
    pieces = PackedGgufLinear(
        parts, [type] * 3, None, torch.bfloat16, release=lambda rows: released.append(rows.clone())
    ).parts[0]
    assert torch.equal(pieces.numbers, whole.numbers) and torch.equal(pieces.scales, whole.scales)
    assert len(released) == 5 and torch.equal(torch.cat(released), torch.cat(parts))
