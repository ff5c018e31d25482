"""Blocks packed again as another type: the same weights bit by bit, or within the stated bounds."""

import pytest
import torch
from quire.kernels.reference.gguf_blocks import INT_TYPES, TYPES, block_type, dequantize
from quire.kernels.reference.gguf_linear import TYPES as MULTIPLIED
from quire.kernels.reference.gguf_repack import TYPES as REPACKED
from quire.kernels.reference.gguf_repack import repack
from quire.tests.kernels.test_gguf_blocks import random_blocks

EXACT = ("Q3_K", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0", "IQ3_S", "IQ1_S", "IQ1_M")
SCALES_ROUNDED = ("IQ4_XS", "IQ2_XXS", "IQ3_XXS")
ROUNDED = ("Q2_K", "IQ2_XS", "IQ2_S", "NVFP4")
USUAL_SCALES = {"Q2_K": [80, 82], "IQ1_M": []} | {
    type: [0] for type in ("IQ4_XS", "IQ2_XXS", "IQ3_XXS", "IQ2_XS", "IQ2_S", "IQ1_S")
}


def weights(type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of random blocks, and the same packed again."""
    blocks = random_blocks(type, 20, 8)
    for at in USUAL_SCALES.get(type, []):
        scales = (torch.rand(20 * 8, 1) * 0.01 + 0.001).half().view(torch.uint8)
        blocks.view(-1, TYPES[type].num_bytes)[:, at : at + 2] = scales
    if type == "IQ1_M":  # the exponent of the scale is 8 to 15 of 31
        blocks.view(-1, TYPES[type].num_bytes)[:, 55] |= 0x20
    repacked = repack(blocks, type)
    assert repacked.shape == (20, 8 * TYPES[type].columns // 32 * 34) or REPACKED[type] != "Q8_0"
    return dequantize(blocks, type), dequantize(repacked, REPACKED[type])


@pytest.mark.parametrize("type", EXACT)
def test_exact(type):
    original, repacked = weights(type)
    assert original.any() and torch.equal(original, repacked)


@pytest.mark.parametrize("type", SCALES_ROUNDED)
def test_within_the_rounding_of_a_scale(type):
    original, repacked = weights(type)
    assert ((original - repacked).abs() <= original.abs() * 2**-11).all()
    assert not torch.equal(original, repacked)


@pytest.mark.parametrize("type", ROUNDED)
def test_within_a_part_of_the_largest_weight(type):
    original, repacked = (x.unflatten(1, (-1, 32)) for x in weights(type))
    assert ((original - repacked).abs() <= original.abs().amax(-1, keepdim=True) / 253).all()


def test_targets_have_kernels_and_sources_have_none():
    assert REPACKED.keys() == {*EXACT, *SCALES_ROUNDED, *ROUNDED}
    assert set(REPACKED.values()) <= set(MULTIPLIED) and not REPACKED.keys() & set(MULTIPLIED)
    blocks = {type for type in (*TYPES, *INT_TYPES) if block_type(type).columns > 1}
    assert blocks == {*REPACKED, *MULTIPLIED}


@pytest.mark.parametrize("type", REPACKED)
def test_pieces(type, monkeypatch):
    blocks = random_blocks(type, 5, 8)
    whole = repack(blocks, type)
    monkeypatch.setattr("quire.kernels.reference.gguf_repack._NUMBERS_AT_ONCE", 1)
    assert torch.equal(repack(blocks, type), whole)
