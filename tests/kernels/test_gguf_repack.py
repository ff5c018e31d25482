"""Blocks packed again as another type: the same weights bit by bit, or within the stated bounds."""

import pytest
import torch
from quire.kernels.reference.gguf_blocks import INT4_TYPES, TYPES, block_type, dequantize
from quire.kernels.reference.gguf_linear import TYPES as MULTIPLIED
from quire.kernels.reference.gguf_repack import TYPES as REPACKED
from quire.kernels.reference.gguf_repack import repack
from quire.tests.kernels.test_gguf_blocks import random_blocks

EXACT = ("Q3_K", "TQ1_0", "TQ2_0")
USUAL_SCALES = {"Q2_K": [80, 82], "IQ4_XS": [0]}


def weights(type: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of random blocks, and the same packed again."""
    blocks = random_blocks(type, 20, 8)
    for at in USUAL_SCALES.get(type, []):
        scales = (torch.rand(20 * 8, 1) * 0.01 + 0.001).half().view(torch.uint8)
        blocks.view(-1, TYPES[type].num_bytes)[:, at : at + 2] = scales
    repacked = repack(blocks, type)
    assert repacked.shape == (20, 8 * TYPES[type].columns // 32 * 34) or REPACKED[type] != "Q8_0"
    return dequantize(blocks, type), dequantize(repacked, REPACKED[type])


@pytest.mark.parametrize("type", EXACT)
def test_exact(type):
    original, repacked = weights(type)
    assert original.any() and torch.equal(original, repacked)


def test_iq4_xs_within_the_rounding_of_a_scale():
    original, repacked = weights("IQ4_XS")
    assert ((original - repacked).abs() <= original.abs() * 2**-11).all()
    assert not torch.equal(original, repacked)


def test_q2_k_within_a_part_of_the_largest_weight():
    original, repacked = (x.unflatten(1, (-1, 32)) for x in weights("Q2_K"))
    assert ((original - repacked).abs() <= original.abs().amax(-1, keepdim=True) / 253).all()


def test_targets_have_kernels_and_sources_have_none():
    assert set(REPACKED.values()) <= set(MULTIPLIED) and not REPACKED.keys() & set(MULTIPLIED)
    blocks = {type for type in (*TYPES, *INT4_TYPES) if block_type(type).columns > 1}
    assert blocks == {*REPACKED, *MULTIPLIED}


@pytest.mark.parametrize("type", REPACKED)
def test_pieces(type, monkeypatch):
    blocks = random_blocks(type, 5, 8)
    whole = repack(blocks, type)
    monkeypatch.setattr("quire.kernels.reference.gguf_repack.PIECE", 1)
    assert torch.equal(repack(blocks, type), whole)
