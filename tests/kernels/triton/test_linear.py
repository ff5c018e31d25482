"""Results of packed layers on a GPU as far as they can be checked without one: shapes, dtypes, and
that logits are not rounded in between.
"""

import pytest
import torch
from quire.kernels.triton.linear import pack_linear
from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.made.append((str(func), result.dtype))
        return result


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_logits_are_f32_from_the_start(dtype, bias):
    weight, x = (
        torch.empty(1000, 64, dtype=dtype, device="meta"),
        torch.empty(3, 64, dtype=dtype, device="meta"),
    )
    multiply = pack_linear(weight, torch.empty(1000, dtype=dtype, device="meta") if bias else None)
    assert multiply(x).dtype == dtype and multiply(x).shape == (3, 1000)
    with Calls() as calls:
        logits = multiply.logits(x)
    assert logits.dtype == torch.float32 and logits.shape == (3, 1000)
    products = [result for name, result in calls.made if "mm" in name]
    assert products == [torch.float32] and not any("copy" in name for name, _ in calls.made)


@pytest.mark.parametrize("outputs", [17, 24])
def test_a_sum_is_rounded_once(outputs):
    """Where cuBLAS may round before it adds the bias, the product is in fp32."""
    empty = {"dtype": torch.bfloat16, "device": "meta"}
    multiply = pack_linear(torch.empty(outputs, 64, **empty), torch.empty(outputs, **empty))
    with Calls() as calls:
        assert multiply(torch.empty(3, 64, **empty)).dtype == torch.bfloat16
    (product,) = [dtype for name, dtype in calls.made if "mm" in name]
    assert product == (torch.float32 if outputs % 8 else torch.bfloat16)


def test_the_weight_is_not_copied():
    weight = torch.randn(8, 4)
    multiply = pack_linear(weight, None)
    assert multiply.weight is weight and not hasattr(multiply, "embedding")
    x = torch.randn(2, 4)
    assert torch.equal(multiply(x), x @ weight.T) and torch.equal(multiply.logits(x), multiply(x))
