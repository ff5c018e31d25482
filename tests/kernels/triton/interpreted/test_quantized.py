"""Int8 and int4 layers have the bits that the reference states, rows that are not finite included,
in both shapes of tiles; so have rows of the packed table.
"""

import pytest
import torch
from quire.kernels import registry


def same(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(mine.isnan(), other.isnan()) and torch.equal(
        mine.nan_to_num(), other.nan_to_num()
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_bits_are_the_references(bits):
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
    ids = torch.tensor([3, 0, 32], dtype=torch.int32)
    assert torch.equal(mine.embedding(ids), other.embedding(ids))
