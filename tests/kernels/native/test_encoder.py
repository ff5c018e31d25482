"""Native kernels of text encoders on every instruction set: a request's bits alone and in any
batch, on any number of threads, and the error of GELU.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quire.kernels.cpu.native.library import library
from quire.tests.kernels.encoder_cases import encoder_metadata, make_bias
from quire.tests.kernels.test_parity import DTYPES

if library is None:
    pytest.skip("the native library is not built", allow_module_level=True)

from quire.kernels.cpu.native import activation
from quire.kernels.cpu.native.attention import encoder_attention, has_native_encoder_heads
from quire.kernels.registry import Facts
from quire.tests.kernels.native.test_isas import same_bits

# (NQ, NKV, D), and window and bias
FORMS: list[tuple[tuple[int, int, int], tuple[Any, ...]]] = [
    ((3, 3, 32), ()),
    ((2, 2, 64), (8,)),
    ((3, 1, 256), (70,)),
    ((2, 2, 40), (0, make_bias(2, 20))),
    ((4, 2, 64), (33, make_bias(4, 70))),
]
LENGTHS = [1, 130, 17, 64, 3, 65, 128, 16, 300]


def attend(
    qkv: torch.Tensor, lengths: list[int], heads: tuple[int, int, int], options: tuple[Any, ...]
) -> torch.Tensor:
    query, key, value = qkv.split((heads[0], heads[1], heads[1]), dim=1)
    metadata = encoder_metadata(lengths)
    return encoder_attention(query, key, value, metadata, heads[2] ** -0.5, *options)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "options"), FORMS, ids=lambda form: str(form[:1]))
def test_a_text_is_the_same_bits_alone_and_in_any_batch(isa, heads, options, dtype):
    torch.manual_seed(0)
    qkv = torch.randn(sum(LENGTHS), heads[0] + 2 * heads[1], heads[2]).to(dtype)
    texts = qkv.split(LENGTHS)
    library.set_num_threads(1)
    alone = [attend(text, [len(text)], heads, options) for text in texts]
    for order in (range(len(texts)), [8, 4, 2], [3, 8]):
        batch = torch.cat([texts[i] for i in order])
        for num_threads in (1, 2, 3):
            library.set_num_threads(num_threads)
            together = attend(batch, [LENGTHS[i] for i in order], heads, options)
            for i, result in zip(order, together.split([LENGTHS[i] for i in order]), strict=True):
                assert same_bits(result, alone[i]), (LENGTHS[i], num_threads)


def test_a_long_text_is_the_same_bits_beside_another_and_on_any_number_of_threads(isa):
    torch.manual_seed(2)
    qkv = torch.randn(2100 + 5, 3, 8).bfloat16()
    library.set_num_threads(1)
    alone = attend(qkv[:2100], [2100], (1, 1, 8), ())
    library.set_num_threads(3)
    assert same_bits(attend(qkv, [2100, 5], (1, 1, 8), ())[:2100], alone)
    query, key, value = qkv[:2100].float().unbind(1)
    expected = (query @ key.T * 8**-0.5).softmax(-1) @ value
    torch.testing.assert_close(alone[:, 0].float(), expected, atol=5e-3, rtol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_other_texts_have_no_effect(isa, bad, dtype):
    torch.manual_seed(1)
    for options in ((), (20,)):
        qkv = torch.randn(40 + 150 + 9, 6, 32).to(dtype)
        before = attend(qkv, [40, 150, 9], (2, 2, 32), options)
        spoilt = 40 + 80
        qkv[spoilt, 2:] = bad
        after = attend(qkv, [40, 150, 9], (2, 2, 32), options)
        assert same_bits(after[:40], before[:40]) and same_bits(after[190:], before[190:])
        assert not after[spoilt - 5 : spoilt + 5].isfinite().any(-1).all()


def test_gelu_is_exact_to_rounding(isa):
    x = torch.cat((torch.linspace(-14, 14, 200_001), torch.randn(1000) * 1e-3))[None]
    exact = x.double() * torch.special.ndtr(x.double())
    error = (activation.gelu(x).double() - exact).abs()
    assert (error <= 3e-7 * x.double().abs()).all()
    near = (x > -2) & (x != 0)
    assert (error[near] <= 6e-7 * exact[near].abs()).all()
    odd = torch.tensor([[math.nan, math.inf, -math.inf, 0.0, 1e30, -1e30]])
    torch.testing.assert_close(
        activation.gelu(odd),
        torch.tensor([[math.nan, math.inf, 0.0, 0.0, 1e30, 0.0]]),
        equal_nan=True,
    )


def test_unsupported_heads_are_declined():
    dims = [
        d for d in range(300) if has_native_encoder_heads(Facts("cpu", torch.bfloat16, head_dim=d))
    ]
    assert dims == list(range(8, 257, 8))
    assert not has_native_encoder_heads(Facts("cpu", torch.float16, head_dim=64))
