"""Layers and experts on blocks have the bits that the reference states for every type, rows that
are not finite included, in both shapes of tiles; so have rows of a packed table. Memory has the
bytes of the blocks.
"""

import pytest
import torch
from quire.kernels import registry
from quire.kernels.moe import ClampedSwiGLU, Experts
from quire.kernels.reference.gguf_linear import TYPES
from quire.tests.kernels.case import random_blocks
from quire.tests.kernels.triton.guard import reachable
from quire.tests.kernels.triton.interpreted.test_quantized import same


def functions(op: str) -> list:
    """Those of Triton and of the reference."""
    registry.import_implementations("cuda")
    found = {i.name: i.function for i in registry.implementations(op)}
    return [found["triton"], found["reference"]]


FEW = ("INT4_128", "Q6_K")  # the others are slow
SLOW = [pytest.param(type, marks=pytest.mark.slow) for type in TYPES if type not in FEW]


@pytest.mark.parametrize("type", [*FEW, *SLOW])
def test_bits_are_the_references(type):
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
