"""Int8 and int4 layers have the bits that the reference states, rows that are not finite included,
in both shapes of tiles; so have rows of the packed table, and experts.
"""

import pytest
import torch
from quire.kernels import registry
from quire.kernels.moe import Experts
from quire.kernels.triton import quantized
from quire.tests.kernels.triton.guard import reachable


def same(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(mine.isnan(), other.isnan()) and torch.equal(
        mine.nan_to_num(), other.nan_to_num()
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_bits_are_the_references(bits, monkeypatch):
    registry.import_implementations("cuda")
    pack = {i.name: i.function for i in registry.implementations("pack_quantized_linear")}
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(33, 300, generator=generator) / 17).bfloat16()
    x = torch.randn(17, 300, generator=generator).bfloat16()
    bias = weight[:, 0].contiguous()
    x[1, 5], x[2, 7], x[3] = torch.nan, torch.inf, 0.0
    mine, other = (pack[name](weight, bias, bits) for name in ("triton", "reference"))
    for count in (4, 17):
        assert same(mine.logits(x[:count]), other.logits(x[:count]))
        assert same(mine(x[:count]), other(x[:count]))
    monkeypatch.setattr(quantized, "MOST_IN_PIECES", 0)
    assert same(mine(x[:4]), other(x[:4]))
    ids = torch.tensor([3, 0, 32], dtype=torch.int32)
    assert torch.equal(mine.embedding(ids), other.embedding(ids))


@pytest.mark.parametrize(("bits", "activation"), [(8, "relu_squared"), (4, "silu")])
def test_experts_are_the_references(bits, activation):
    registry.import_implementations("cuda")
    torch.manual_seed(0)
    rows = 96 if activation == "silu" else 48
    gate_up, down = (torch.randn(3, *size).bfloat16() / 9 for size in ((rows, 80), (80, 48)))
    biases = torch.randn(rows).bfloat16(), torch.randn(80).bfloat16()
    x, ids = torch.randn(4, 80).bfloat16(), torch.tensor([[0, 2], [2, 1], [2, 0], [1, 0]]).int()
    x[1, 5], weights, results = torch.nan, torch.rand(4, 2), []
    for name in ("triton", "reference"):
        pack, mix = (
            next(i.function for i in registry.implementations(op) if i.name == name)
            for op in ("pack_quantized_linear", "fused_moe")
        )
        layers = [
            [pack(weight, bias, bits) for weight in part]
            for part, bias in zip((gate_up, down), biases)
        ]
        held = [t for part in layers for one in part for t in vars(one).values()]
        with reachable([t for t in held if isinstance(t, torch.Tensor)]):
            results.append(mix(x, ids, weights, Experts(*layers, activation)))
    mine, other = results
    if activation == "relu_squared":
        assert same(mine, other)
    else:  # the activations' last bits differ, as with weights in bf16
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2, equal_nan=True)
