"""Layers and experts of FP8 against the reference: every number of e4m3 and its scale exactly, sums
up to their order. Memory has the bytes of the blocks.
"""

import pytest
import torch
from quire.kernels.moe import Experts
from quire.kernels.reference.gguf_blocks import dequantize
from quire.kernels.reference.gguf_linear import quantize_e4m3
from quire.kernels.triton.e4m3 import rows_for
from quire.tests.kernels.case import random_blocks
from quire.tests.kernels.triton.guard import reachable
from quire.tests.kernels.triton.interpreted.test_blocks import functions
from quire.tests.kernels.triton.interpreted.test_quantized import same


@pytest.mark.parametrize("type", ["FP8_32", "FP8_128"])
def test_every_number_is_exact(type):
    """The products with unit vectors are the columns of the weight."""
    torch.manual_seed(0)
    blocks = random_blocks(20, 128, type)
    blocks[:2, -28:] = torch.arange(28).byte()  # some are subnormal
    blocks[2, -1] = 127  # NaN
    pack, _ = functions("pack_gguf_linear")
    layer = pack([blocks], [type], None, torch.bfloat16)
    assert sum(part.data.nbytes for part in layer.parts) == blocks.nbytes
    weight = dequantize(blocks, type)
    products = layer.logits(torch.eye(128).bfloat16())
    assert same(products.T[:2], weight[:2]) and same(products.T[3:], weight[3:])
    assert products[-1, 2].isnan()
    assert torch.equal(layer.embedding(torch.tensor([3, 0]).int()), weight[[3, 0]].bfloat16())


def test_sums_are_the_references():
    """Also with blocks of integers in one layer, and few rows."""
    torch.manual_seed(1)
    kinds = ["FP8_128", "INT4_128", "FP8_32"]
    blocks, bias = [random_blocks(35, 256, kind) for kind in kinds], torch.randn(105).bfloat16()
    x = torch.randn(17, 256).bfloat16()
    mine, other = (p(blocks, kinds, bias, torch.bfloat16) for p in functions("pack_gguf_linear"))
    for count in (3, 17):
        torch.testing.assert_close(mine.logits(x[:count]), other.logits(x[:count]))


def test_experts_are_the_references():
    torch.manual_seed(2)
    down = [random_blocks(128, 128, "FP8_128") for _ in range(3)]
    gate_up = [random_blocks(256, 128, "FP8_128") for _ in range(3)]
    biases = torch.randn(256).bfloat16(), torch.randn(128).bfloat16()
    x, ids = torch.randn(4, 128).bfloat16(), torch.tensor([[0, 2], [2, 1], [2, 0], [1, 0]]).int()
    weights, results = torch.rand(4, 2), []
    for pack, mix in zip(functions("pack_gguf_linear"), functions("fused_moe")):
        layers = [
            [pack([one], ["FP8_128"], bias, torch.bfloat16) for one in part]
            for part, bias in zip((gate_up, down), biases)
        ]
        held = [p.data for one in sum(layers, []) for p in getattr(one, "parts", ())]
        with reachable([*held, *biases]):
            results.append(mix(x, ids, weights, Experts(*layers, "silu")))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


IN_FP8 = ["FP8_128_GROUP", "FP8_32_GROUP", "FP8_128_TOKEN", "FP8_32_STATIC"]


@pytest.mark.parametrize("type", IN_FP8)
def test_rows_are_quantized_as_the_reference_does(type):
    """Bit for bit; also the largest numbers, zeros, and rows that are not finite."""
    torch.manual_seed(3)
    x = torch.randn(7, 300).bfloat16()[:, :288]
    x[1], x[2, 3], x[3, 5], x[4, :9] = 0.0, torch.inf, torch.nan, 3e38
    x[5] *= 1e-8
    given = torch.tensor([0.004]) if type.endswith("STATIC") else None
    rows = rows_for(x, type, given)
    numbers, scales = quantize_e4m3(x.float(), type, given)
    mine = rows.numbers.float()
    assert mine[3].isnan().any() and mine[2].isnan().any()
    for found, wanted in ((rows.scales, scales), (mine, numbers)):
        assert same(found[:3], wanted[:3]) and same(found[4:], wanted[4:])


@pytest.mark.parametrize("type", IN_FP8)
def test_products_of_rows_in_fp8_are_the_references(type):
    """A layer of two parts, whose static scales are not the same; in every shape of tiles."""
    torch.manual_seed(4)
    blocks, bias = [random_blocks(n, 256, type) for n in (33, 7)], torch.randn(40).bfloat16()
    x = torch.randn(70, 256).bfloat16()
    packs = functions("pack_gguf_linear", "triton_fp8")
    mine, other = (p(blocks, [type] * 2, bias, torch.bfloat16) for p in packs)
    assert len(mine.parts) == 1 + type.endswith("STATIC")
    of_bf16 = packs[1](blocks, [type.rpartition("_")[0]] * 2, bias, torch.bfloat16)
    for count in (3, 17, 70) if type == IN_FP8[0] else (3,):
        wanted = other.logits(x[:count])
        torch.testing.assert_close(mine.logits(x[:count]), wanted)
        if not type.endswith("STATIC"):
            assert 1e-4 < (wanted - of_bf16.logits(x[:count])).std() / wanted.std() < 0.05


@pytest.mark.parametrize("type", ["FP8_128_GROUP", "FP8_32_STATIC"])
def test_experts_of_rows_in_fp8_are_the_references(type):
    """Each expert has a static scale of its own."""
    torch.manual_seed(5)
    down = [random_blocks(128, 128, type) for _ in range(3)]
    gate_up = [random_blocks(256, 128, type) for _ in range(3)]
    x, ids = torch.randn(4, 128).bfloat16(), torch.tensor([[0, 2], [2, 1], [2, 0], [1, 0]]).int()
    weights, results = torch.rand(4, 2), []
    packs, mixes = functions("pack_gguf_linear", "triton_fp8"), functions("fused_moe")
    for pack, mix in zip(packs, mixes):
        layers = [
            [pack([one], [type], None, torch.bfloat16) for one in part] for part in (gate_up, down)
        ]
        parts = [p for one in sum(layers, []) for p in getattr(one, "parts", ())]
        held = [t for p in parts for t in (p.data, p.x_scale) if t is not None]
        with reachable(held):
            results.append(mix(x, ids, weights, Experts(*layers, "silu")))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)
