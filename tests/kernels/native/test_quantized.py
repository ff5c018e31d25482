"""Linear layers over int8 and int4 weights on each instruction set: the reference's bits whatever
rows are computed together, and weights near the given ones.
"""

from __future__ import annotations

import pytest
import torch
from quire.kernels.cpu.native.library import library
from quire.kernels.ops import silu_and_mul
from quire.kernels.reference.quantized import GROUP, QuantizedLinear
from quire.tests.kernels.native.conftest import NEEDS_LIBRARY
from torch import Tensor

if library is not None:
    from quire.kernels.cpu.native.quantized import pack_quantized_linear

SHAPES = ((1, 1), (16, 64), (33, 65), (40, 200), (96, 448), (48, 1216))  # out, in
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 17, 33)  # few and many rows use different instructions
WORD = {torch.bfloat16: torch.int16, torch.float32: torch.int32}

bits = pytest.mark.parametrize("bits", [8, 4])
dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype).removeprefix("torch.")
)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(x.contiguous().view(WORD[x.dtype]) for x in (a, b)))


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (normal(out_features, in_features, dtype=torch.float32) / in_features**0.5).to(
        dtype
    ), normal(out_features, dtype=dtype, seed=1)


@pytest.mark.sampled
@bits
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bits_equal_the_references_for_any_number_of_rows_and_threads(isa, shape, dtype, bits):
    weight, bias = make(*shape, dtype)
    layer, reference = (
        pack_quantized_linear(weight, bias, bits),
        QuantizedLinear(weight, bias, bits),
    )
    x = normal(max(ROWS), shape[1], dtype=dtype, seed=2)
    expected, logits = reference(x), reference.logits(x)
    for num_rows in ROWS:
        library.set_num_threads(1 + num_rows % 2)
        assert same_bits(layer(x[-num_rows:]), expected[-num_rows:]), num_rows
        assert same_bits(layer.logits(x[:num_rows]), logits[:num_rows]), num_rows


@bits
def test_panels_read_side_by_side(isa, bits):
    """A thread's share is several times the number of panels multiplied at once, and no multiple of
    it.
    """
    weight, bias = make(1184, 65, torch.bfloat16)
    layer, x = pack_quantized_linear(weight, bias, bits), normal(4, 65, dtype=torch.bfloat16)
    expected = QuantizedLinear(weight, bias, bits)(x)
    for num_rows in (1, 2, 4):
        assert same_bits(layer(x[:num_rows]), expected[:num_rows]), num_rows
        assert same_bits(layer.silu_and_mul(x[:num_rows]), silu_and_mul(expected[:num_rows])), (
            num_rows
        )


@bits
def test_more_rows_than_are_quantized_together(isa, bits):
    layer = pack_quantized_linear(*make(24, 70, torch.bfloat16), bits)
    x = normal(1100, 70, dtype=torch.bfloat16)
    library.set_num_threads(3)
    whole = layer(x)
    for start in (0, 511, 512, 1024, 1099):
        assert same_bits(layer(x[start : start + 1]), whole[start : start + 1])


@bits
def test_numbers_at_the_edge_of_their_range(isa, bits):
    """All numbers of the largest magnitude, of one sign or alternating: no sum of products may
    overflow.
    """
    signs = torch.tensor(
        [
            [1.0, 1.0, 1.0, 1.0],
            [-1.0, -1.0, -1.0, -1.0],
            [1.0, -1.0, 1.0, -1.0],
            [1.0, 1.0, -1.0, -1.0],
            [0.0, 0.0, 0.0, 0.0],
        ]
    )
    rows = signs.repeat(4, 96)  # [20, 384]: a complete group of int8 and a part of one
    layer, reference = (
        pack_quantized_linear(rows * 3, None, bits),
        QuantizedLinear(rows * 3, None, bits),
    )
    for x in (rows[:5], rows):
        assert same_bits(layer(x), reference(x))
        torch.testing.assert_close(
            layer(x), x @ rows.T * 3, rtol=0.01 if bits == 8 else 0.1, atol=0
        )


@bits
def test_an_outlier_affects_only_its_group(isa, bits):
    layer = pack_quantized_linear(*make(32, 640, torch.float32), bits)
    x = normal(9, 640, dtype=torch.float32)
    spoilt = x.clone()
    spoilt[4, 70] = 1e6
    kept = [row for row in range(9) if row != 4]
    assert same_bits(layer(spoilt)[kept], layer(x)[kept])
    beside = torch.arange(640) // GROUP[bits] == 70 // GROUP[bits]
    apart = layer(torch.where(beside, 0.0, spoilt)) + layer(torch.where(beside, spoilt, 0.0))
    torch.testing.assert_close(apart - layer.bias, layer(spoilt), rtol=1e-5, atol=0.1)


@bits
@dtypes
def test_a_row_that_is_not_finite_gives_nan_and_only_there(isa, dtype, bits):
    layer = pack_quantized_linear(*make(48, 130, dtype), bits)
    x = normal(12, 130, dtype=dtype)
    spoilt = x.clone()
    spoilt[1, 129], spoilt[3, 0], spoilt[10, 64] = float("nan"), float("inf"), -float("inf")
    for num_rows in (2, 5, 12):
        result, kept = (
            layer(spoilt[:num_rows]),
            [row for row in range(num_rows) if row not in (1, 3, 10)],
        )
        assert same_bits(result[kept], layer(x[:num_rows])[kept])
        assert all(result[row].isnan().all() for row in (1, 3, 10) if row < num_rows)


@pytest.mark.skipif(library is None, reason=NEEDS_LIBRARY)
@bits
def test_weights_that_are_zero_tiny_or_not_finite(bits):
    weight = normal(20, 192, dtype=torch.float32)
    weight[1], weight[2], weight[3, 70], weight[4, 3], weight[5, :64] = (
        0,
        1e-38,
        float("nan"),
        float("inf"),
        0,
    )
    layer, x = (
        pack_quantized_linear(weight, None, bits),
        normal(10, 192, dtype=torch.float32, seed=3),
    )
    for rows in (x[:1], x):
        result = layer(rows)
        assert same_bits(
            result.nan_to_num(7), QuantizedLinear(weight, None, bits)(rows).nan_to_num(7)
        )
        assert (
            (result[:, 1:3].abs() < 1e-30).all()
            and result[:, 3:5].isnan().all()
            and result[:, [0, *range(5, 20)]].isfinite().all()
        )


@bits
@dtypes
def test_gated_is_silu_and_mul_of_the_plain_result(isa, dtype, bits):
    layer = pack_quantized_linear(*make(96, 100, dtype), bits)
    x = normal(19, 100, dtype=dtype)
    assert layer.can_gate and not pack_quantized_linear(*make(40, 100, dtype), bits).can_gate
    for num_rows in (1, 3, 19):
        assert same_bits(layer.silu_and_mul(x[:num_rows]), silu_and_mul(layer(x[:num_rows])))


@dtypes
def test_rows_of_a_table_are_what_is_multiplied_by(isa, dtype):
    weight, _ = make(37, 130, dtype)
    layer, token_ids = (
        pack_quantized_linear(weight, None, 8),
        torch.tensor([36, 0, 17, 17], dtype=torch.int32),
    )
    assert same_bits(
        layer.embedding(token_ids), QuantizedLinear(weight, None, 8).embedding(token_ids)
    )
    assert same_bits(layer.embedding(token_ids.long()), layer.embedding(token_ids))
    assert layer.embedding(torch.tensor([37, -1], dtype=torch.int32)).isnan().all()


@pytest.mark.skipif(library is None, reason="native kernels are not built here")
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.007), (4, 0.084)])
def test_weights_stay_near_the_given_ones(bits, bound):
    """Root mean square error relative to normal weights.

    A scale for each 32 weights that maps the largest to -8 has 0.086; the measured value here is
    0.0825.
    """
    weight = normal(512, 640, dtype=torch.float32)
    layer = QuantizedLinear(weight, None, bits)
    values = (layer.numbers * layer.scales.unsqueeze(-1)).flatten(1)[:, :640]
    assert ((values - weight).square().mean() / weight.square().mean()).sqrt() < bound
    # exact: all numbers of a group of x are 127
    product = pack_quantized_linear(weight, None, bits)(torch.eye(640))
    torch.testing.assert_close(product.T, values, rtol=1e-6, atol=1e-7)
