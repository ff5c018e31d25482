"""Layers and experts on blocks have the bits that the reference states for every type, rows that
are not finite included, in both shapes of tiles; so have rows of a packed table. Memory has the
bytes of the blocks.
"""

import pytest
import torch
from quire.kernels import registry
from quire.kernels.moe import ClampedSwiGLU, Experts
from quire.kernels.reference.gguf_linear import TYPES
from quire.kernels.triton import quantized
from quire.kernels.triton.blocks import _PLANES, pack_planes
from quire.tests.kernels.case import DenseLayer, random_blocks
from quire.tests.kernels.triton.guard import reachable
from quire.tests.kernels.triton.interpreted.test_quantized import same


def functions(op: str, name: str = "triton") -> list:
    """That of this name and that of the reference."""
    registry.import_implementations("cuda")
    found = {i.name: i.function for i in registry.implementations(op)}
    return [found[name], found["reference"]]


FEW = ("INT4_128", "Q6_K")  # the others are slow
SLOW = [pytest.param(type, marks=pytest.mark.slow) for type in TYPES if type not in FEW]


@pytest.mark.parametrize("type", _PLANES)
def test_blocks_are_packed_on_their_own_device(type):
    """Whatever the device: an operation with a tensor of another one raises an error."""
    blocks = random_blocks(3, 256, type)
    packed = pack_planes(blocks.to("meta"), type)
    assert packed.data.is_meta and packed.data.shape == pack_planes(blocks, type).data.shape


@pytest.mark.parametrize("type", [*FEW, *SLOW])
def test_bits_are_the_references(type, monkeypatch):
    torch.manual_seed(0)
    # one and the other type of 32 columns, or 256, in one layer
    blocks = [random_blocks(33, 256, type), random_blocks(2, 256, "Q8_0")]
    x, bias = torch.randn(17, 256).bfloat16(), torch.randn(35).bfloat16()
    x[1, 5], x[2, 7], x[3] = torch.nan, torch.inf, 0.0
    packs = functions("pack_gguf_linear")
    mine, other = (pack(blocks, [type, "Q8_0"], bias, torch.bfloat16) for pack in packs)
    for count in (4, 17):
        assert same(mine.logits(x[:count]), other.logits(x[:count]))
    assert same(mine(x[:4]), other(x[:4]))
    monkeypatch.setattr(quantized, "MOST_IN_PIECES", 0)
    assert same(mine(x[:4]), other(x[:4]))
    mine, other = (pack(blocks[:1], [type], None, torch.bfloat16) for pack in packs)
    assert sum(part.data.nbytes for part in mine.parts) == blocks[0].nbytes
    ids = torch.tensor([3, 0, 32], dtype=torch.int32)
    assert torch.equal(mine.embedding(ids), other.embedding(ids))


@pytest.mark.parametrize(
    ("type", "activation"),
    [("MXFP4", ClampedSwiGLU(1.702, 7.0)), pytest.param("Q6_K", "silu", marks=pytest.mark.slow)],
)
def test_experts_are_the_references(type, activation):
    torch.manual_seed(1)
    packs = functions("pack_gguf_linear")
    gate_up, down = [random_blocks(512, 256, type) for _ in range(3)], random_blocks(256, 256, type)
    biases = torch.randn(512).bfloat16(), torch.randn(256).bfloat16()
    x, ids = torch.randn(4, 256).bfloat16(), torch.tensor([[0, 2], [2, 1], [2, 0], [1, 0]]).int()
    weights, results = torch.rand(4, 2), []
    for pack, mix in zip(packs, functions("fused_moe")):
        first = [pack([blocks], [type], biases[0], torch.bfloat16) for blocks in gate_up]
        second = [pack([down], [type], biases[1], torch.bfloat16) for _ in gate_up]
        held = [part for layer in (*first, *second) for part in getattr(layer, "parts", ())]
        with reachable([part.data for part in held] + [*biases]):
            results.append(mix(x, ids, weights, Experts(first, second, activation)))
    mine, other = results
    # the activations' last bits differ, as with weights in bf16
    torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("activation", ["silu", "relu_squared"])
def test_experts_of_several_types_are_the_references(activation):
    """Within an expert, among experts, and beside one that is dense."""
    torch.manual_seed(2)
    kinds = [["Q8_0", "INT4_128"], ["INT4_128", "INT4_128"], ["INT4_128", "Q8_0"]]
    blocks = [[random_blocks(40, 128, kind) for kind in of_expert] for of_expert in kinds]
    rows = 40 if activation == "silu" else 80
    dense = DenseLayer(torch.randn(80, 128).bfloat16() / 11)
    down = [DenseLayer(torch.randn(128, rows).bfloat16() / 9) for _ in range(4)]
    x, ids = torch.randn(4, 128).bfloat16(), torch.tensor([[0, 3], [2, 1], [3, 0], [1, 2]]).int()
    weights, results = torch.rand(4, 2), []
    for pack, mix in zip(functions("pack_gguf_linear"), functions("fused_moe")):
        first = [pack(*one, None, torch.bfloat16) for one in zip(blocks, kinds)] + [dense]
        held = [part.data for layer in first for part in getattr(layer, "parts", ())]
        with reachable([*held, *(layer.weight for layer in (dense, *down))]):
            results.append(mix(x, ids, weights, Experts(first, down, activation)))
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


def test_experts_of_several_types_have_the_bits_of_each_layer():
    """Of the second layer, whose results are not activated."""
    torch.manual_seed(3)
    kinds = ["Q8_0", "INT4_128", "INT4_128"]
    blocks, bias = [random_blocks(40, 128, kind) for kind in kinds], torch.randn(40).bfloat16()
    x, ids = torch.randn(3, 40).bfloat16(), torch.tensor([[0], [2], [1]]).int()
    first = [DenseLayer(torch.eye(128, 40).bfloat16())] * 3
    results = []
    for pack, mix in zip(functions("pack_gguf_linear"), functions("fused_moe")):
        down = [pack([one], [kind], bias, torch.bfloat16) for one, kind in zip(blocks, kinds)]
        held = [part.data for layer in down for part in getattr(layer, "parts", ())]
        with reachable([*held, bias, first[0].weight]):
            results.append(mix(x, ids, torch.ones(3, 1), Experts(first, down, "relu_squared")))
    assert torch.equal(*results)
