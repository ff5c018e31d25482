"""Products of fixed tiles in Triton's interpreter: right, and a row's bits are the same alone,
among few rows and among many.
"""

import pytest
import torch
from quire.kernels.triton import product


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_rows_bits_do_not_depend_on_the_others(dtype, ordered_dots, monkeypatch):
    """Of 70 rows a program computes both pieces, of fewer each piece has a program."""
    monkeypatch.setattr(product, "PROGRAMS", 4)
    product.piece_of.cache_clear()
    torch.manual_seed(0)
    weight, bias = torch.randn(100, 600).to(dtype) / 24, torch.randn(100).to(dtype)
    x = torch.randn(70, 640).to(dtype)[:, :600]
    multiply = product.pack_linear(weight, bias)
    product.piece_of.cache_clear()
    monkeypatch.setattr(product, "PROGRAMS", 1)
    together = multiply(x)
    monkeypatch.setattr(product, "PROGRAMS", 4)
    exact = x.double() @ weight.double().T + bias.double()
    rounding = 2**-8 if dtype == torch.bfloat16 else 2**-18
    torch.testing.assert_close(together.double(), exact, rtol=rounding, atol=rounding)
    for begin, end in ((0, 1), (69, 70), (3, 12), (0, 70)):
        assert torch.equal(multiply(x[begin:end]), together[begin:end])
        logits = multiply.logits(x[begin:end])
        assert logits.dtype == torch.float32
        assert torch.equal(logits.to(dtype), together[begin:end])
    assert not multiply._counters.any()
    assert multiply(x[:0]).shape == (0, 100)
