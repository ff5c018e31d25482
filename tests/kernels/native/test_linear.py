"""Native linear layers on each instruction set: correct over ragged shapes, and the same bits
whatever rows are computed together.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from quire.kernels.cpu.native.library import library
from quire.kernels.ops import silu_and_mul
from torch import Tensor

if library is not None:
    from quire.kernels.cpu.native.linear import PackedLinear, pack_linear
    from quire.kernels.cpu.native.quantized import PackedQuantizedLinear

DTYPES = (torch.bfloat16, torch.float32)
# out, in
SHAPES = ((1, 1), (16, 2), (17, 3), (33, 31), (100, 33), (48, 531), (160, 896), (64, 1100))
ROWS = (1, 2, 3, 5, 7, 15, 16, 17, 31, 33, 97)
FAST_ROWS = (1, 6, 33)  # rows with emulated instructions
WORD = {torch.bfloat16: torch.int16, torch.float32: torch.int32}

dtypes = pytest.mark.parametrize(
    "dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch.")
)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(x.contiguous().view(WORD[x.dtype]) for x in (a, b)))


def make(
    out_features: int, in_features: int, dtype: torch.dtype, bias: bool = True
) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(out_features * in_features)
    weight = torch.randn(out_features, in_features, generator=generator) / in_features**0.5
    return weight.to(dtype), torch.randn(out_features, generator=generator).to(
        dtype
    ) if bias else None


def rows_for(isa: str) -> tuple[int, ...]:
    return ROWS if isa in library.isas else FAST_ROWS


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_against_fp64_is_no_worse_than_torch(isa, shape, dtype):
    weight, bias = make(*shape, dtype)
    x = torch.randn(97, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    truth = F.linear(x.double(), weight.double(), bias.double())
    scale = truth.square().mean().sqrt()
    errors = [
        (result.double() - truth).square().mean().sqrt() / scale
        for result in (pack_linear(weight, bias)(x), F.linear(x, weight, bias))
    ]
    assert errors[0] <= 1.5 * max(errors[1], 2**-9 if dtype == torch.bfloat16 else 2**-23)


@pytest.mark.sampled
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_among_any_number(isa, shape, dtype, num_threads):
    layer = pack_linear(*make(*shape, dtype))
    x = torch.randn(max(rows_for(isa)), shape[1], generator=torch.Generator().manual_seed(2)).to(
        dtype
    )
    library.set_num_threads(1)
    alone = torch.cat([layer(row[None]) for row in x])
    library.set_num_threads(num_threads)
    for num_rows in rows_for(isa):
        assert same_bits(layer(x[:num_rows]), alone[:num_rows]), num_rows
        assert same_bits(layer(x[-num_rows:]), alone[-num_rows:]), num_rows


@dtypes
@pytest.mark.parametrize("bias", [True, False])
def test_gated_is_the_plain_product_and_then_the_activation(isa, dtype, bias):
    for out_features, in_features in ((32, 5), (96, 200), (320, 70)):
        layer = pack_linear(*make(out_features, in_features, dtype, bias))
        for num_rows in rows_for(isa):
            x = 4 * torch.randn(
                num_rows, in_features, generator=torch.Generator().manual_seed(num_rows)
            ).to(dtype)
            assert same_bits(layer.silu_and_mul(x), silu_and_mul(layer(x)))


def test_only_whole_panels_of_gate_and_up_can_be_gated():
    if library is None:
        pytest.skip("native kernels are not built")
    assert pack_linear(*make(64, 8, torch.bfloat16)).can_gate
    assert not pack_linear(*make(48, 8, torch.bfloat16)).can_gate


@dtypes
def test_logits_are_the_sums_before_rounding(isa, dtype):
    weight, _ = make(100, 300, dtype)
    layer = pack_linear(weight, None)
    x = torch.randn(5, 300, generator=torch.Generator().manual_seed(3)).to(dtype)
    logits = layer.logits(x)
    assert logits.dtype == torch.float32 and same_bits(logits.to(dtype), layer(x))
    torch.testing.assert_close(
        logits, F.linear(x.double(), weight.double()).float(), rtol=1e-5, atol=1e-5
    )


@dtypes
@pytest.mark.parametrize("in_features", [7, 64, 600])
def test_rows_of_nan_and_infinity_do_not_affect_others(isa, dtype, in_features):
    layer = pack_linear(*make(40, in_features, dtype))
    x = torch.randn(20, in_features, generator=torch.Generator().manual_seed(4)).to(dtype)
    expected = layer(x)
    x[3], x[4], x[11, -1] = float("nan"), float("inf"), float("nan")
    result = layer(x)
    kept = [row for row in range(20) if row not in (3, 4, 11)]
    assert same_bits(result[kept], expected[kept])
    assert result[[3, 11]].isnan().all() and not result[4].isfinite().any()


@dtypes
def test_an_infinite_weight_stays_in_its_output(isa, dtype):
    """Its panel also has other outputs, and the zeros that pad the last panel."""
    weight, bias = make(19, 33, dtype)
    x = torch.randn(3, 33, generator=torch.Generator().manual_seed(5)).to(dtype)
    expected = pack_linear(weight, bias)(x)
    weight[18, 32] = float("inf")
    result = pack_linear(weight, bias)(x)
    assert same_bits(result[:, :18], expected[:, :18]) and result[:, 18].isinf().all()


@dtypes
def test_rows_may_be_part_of_a_wider_tensor(isa, dtype):
    layer = pack_linear(*make(50, 70, dtype))
    wide = torch.full((9, 200), float("nan"), dtype=dtype)
    wide[:, 13:83] = torch.randn(9, 70, generator=torch.Generator().manual_seed(6)).to(dtype)
    assert same_bits(layer(wide[:, 13:83]), layer(wide[:, 13:83].contiguous()))


def test_no_rows_give_no_rows(isa):
    layer = pack_linear(*make(32, 8, torch.bfloat16))
    assert layer(torch.empty(0, 8, dtype=torch.bfloat16)).shape == (0, 32)


@dtypes
def test_rows_of_a_packed_table_are_the_tables(isa, dtype):
    for out_features, in_features in ((50, 70), (16, 33), (3, 1)):
        table, _ = make(out_features, in_features, dtype)
        token_ids = (
            torch.arange(out_features + 2)[
                torch.randperm(out_features + 2, generator=torch.Generator().manual_seed(8))
            ]
            - 1
        )
        known = (token_ids >= 0) & (token_ids < out_features)
        rows = pack_linear(table, None).embedding(token_ids)
        assert (
            same_bits(rows[known], table[token_ids[known]])
            and rows[~known].isnan().all()
            and not known.all()
        )


@dtypes
def test_packing_gives_panels_of_sixteen_outputs(dtype):
    """The layout of src/abi.h, which all instruction sets and a tied table's embedding read."""
    if library is None:
        pytest.skip("native kernels are not built")
    library.set_num_threads(2)
    pair = 2 if dtype == torch.bfloat16 else 1
    for out_features, in_features in ((1, 1), (16, 4), (37, 9), (300, 64)):
        wide = torch.randn(
            out_features, in_features + 3, generator=torch.Generator().manual_seed(7)
        ).to(dtype)
        weight = wide[:, :in_features]  # with a gap between rows
        padded = F.pad(weight, (0, -in_features % pair, 0, -out_features % 16))
        expected = padded.view(len(padded) // 16, 16, -1, pair).transpose(1, 2)
        assert torch.equal(PackedLinear([weight], None).weight, expected)
    library.set_num_threads(1)


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_a_weight_packed_in_pieces_is_the_same_and_each_row_is_released_once(bits, monkeypatch):
    if library is None:
        pytest.skip("native kernels are not built")
    make = PackedLinear if bits is None else partial(PackedQuantizedLinear, bits=bits)
    parts, released = [torch.randn(rows, 128).bfloat16() for rows in (64, 48, 37)], []
    whole = make(parts, None)
    monkeypatch.setattr("quire.kernels.cpu.native.linear._PIECE_BYTES", 16 * 256 + 1)
    pieces = make(parts, None, release=released.append)
    assert torch.equal(pieces.weight.view(torch.uint8), whole.weight.view(torch.uint8))
    assert len(released) == 4 + 3 + 3 and torch.equal(torch.cat(released), torch.cat(parts))
