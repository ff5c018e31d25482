"""Every block type of GGUF files against the `gguf` package, bit by bit, and those that the package
cannot read against the loops of ggml-quants.c, written in numpy.
"""

import gguf
import numpy as np
import pytest
import torch
from quire.kernels.reference import gguf_blocks
from quire.kernels.reference.gguf_blocks import TYPES, dequantize, row_bytes

# fp16 and bf16 fields of a block: (first byte, type); random bytes there would often be NaN
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "IQ2_XXS": [0],
    "IQ2_XS": [0],
    "IQ2_S": [0],
    "IQ3_XXS": [0],
    "IQ3_S": [0],
    "IQ1_S": [0],
    "TQ1_0": [52],
    "TQ2_0": [64],
    "Q1_0": [0],
    "Q2_0": [0],
    "F16": [0],
}
EXTREMES = [0.0, -0.0, 2**-24, -(2**-24), 2**-14, 65504.0, -65504.0, 1.0, 1 / 3]
OWN_BYTES = {"Q1_0": (128, 18), "Q2_0": (64, 18)}  # columns and bytes of types that gguf lacks
NUMBERS = {"F32": torch.float32, "BF16": torch.bfloat16}


def random_blocks(type: str, rows: int, blocks: int) -> torch.Tensor:
    """[rows, bytes]: random bits, half of the scales at the ends of their range."""
    generator = torch.Generator().manual_seed(rows)
    if type in NUMBERS:
        values = torch.randn(rows, blocks, generator=generator).to(NUMBERS[type])
        return values.view(torch.uint8)
    num_bytes = TYPES[type].num_bytes
    bits = torch.randint(256, (rows * blocks, num_bytes), generator=generator, dtype=torch.uint8)
    for start in HALVES.get(type, []):
        usual = torch.randn(rows * blocks, generator=generator) * 0.01
        chosen = torch.randint(len(EXTREMES), (rows * blocks,), generator=generator)
        extreme = torch.tensor(EXTREMES)[chosen]
        scales = torch.where(torch.arange(rows * blocks) % 2 == 0, usual, extreme).half()
        bits[:, start : start + 2] = scales.view(-1, 1).view(torch.uint8)
    if type == "IQ1_M":
        bits[:, 55] &= 0xBF  # the highest bit of the scale's exponent, whose parts lie apart
    if type == "MXFP4":
        bits[:6, 0] = torch.tensor([0, 1, 2, 3, 254, 127])[: len(bits[:6])]
    return bits.view(rows, -1)


def expected_weights(type: str, packed: np.ndarray) -> np.ndarray:
    if type not in OWN_BYTES:
        with np.errstate(over="ignore"):  # MXFP4: 12 * 2**127 is infinite
            return gguf.dequantize(packed, gguf.GGMLQuantizationType[type])
    columns, num_bytes = OWN_BYTES[type]
    width = 8 * (num_bytes - 2) // columns
    weights = []
    for block in packed.reshape(-1, num_bytes):
        scale = block[:2].view(np.float16)[0].astype(np.float32)
        for j in range(columns):
            number = int(block[2 + j * width // 8]) >> j * width % 8 & 2**width - 1
            whole = number - 1 if type == "Q2_0" else 1 if number else -1
            weights.append(np.float32(whole) * scale)
    return np.array(weights, dtype=np.float32).reshape(len(packed), -1)


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 5), (64, 8)])
def test_dequantizes_as_gguf_does(type, rows, blocks, monkeypatch):
    monkeypatch.setattr(gguf_blocks, "PIECE", 7 * 256)  # several pieces, the last one shorter
    packed = random_blocks(type, rows, blocks)
    expected = expected_weights(type, packed.numpy())
    result = dequantize(packed, type)
    assert result.shape == expected.shape == (rows, blocks * TYPES[type].columns)
    assert not np.isnan(expected).any() and expected.any()
    assert np.array_equal(result.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type", TYPES)
def test_sizes_are_those_of_gguf(type):
    own = OWN_BYTES.get(type)
    sizes = own or gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    assert sizes == TYPES[type][:2]
    assert row_bytes(512, type) == 512 // TYPES[type].columns * TYPES[type].num_bytes


def test_a_row_may_lie_anywhere():
    """Rows of a mapped file start at any address."""
    packed = random_blocks("Q4_K", 3, 2)
    shifted = torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].view(packed.shape)
    shifted.copy_(packed)
    assert torch.equal(dequantize(shifted, "Q4_K"), dequantize(packed, "Q4_K"))


def test_what_is_refused():
    with pytest.raises(ValueError, match="type Q8_1 is not supported; supported: F32, F16"):
        dequantize(torch.zeros(1, 36, dtype=torch.uint8), "Q8_1")
    with pytest.raises(ValueError, match="Q8_0 needs rows of bytes in blocks of 34"):
        dequantize(torch.zeros(1, 35, dtype=torch.uint8), "Q8_0")
    with pytest.raises(ValueError, match="100 weights is not a whole number of Q4_0 blocks of 32"):
        row_bytes(100, "Q4_0")
