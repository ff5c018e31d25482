"""Layers and experts of FP8 against the reference: every number of e4m3 and its scale exactly, sums
up to their order. Memory has the bytes of the blocks.
"""

import pytest
import torch
from quire.kernels.moe import Experts
from quire.kernels.reference.gguf_blocks import dequantize
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
