"""On a GPU: the bits of products of fixed tiles, for any number of rows. Skipped without one."""

import pytest
import torch
from quire.kernels import registry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SHAPES = [(4864, 896), (896, 9728), (384, 17)]  # inputs and outputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rows_bits_do_not_depend_on_the_others(shape, dtype):
    """Tiles of 64 rows and of 128, pieces in one program and in several."""
    inputs, outputs = shape
    torch.manual_seed(0)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to("cuda", dtype)
    x = torch.randn(2000, inputs).to("cuda", dtype)
    pack = registry.select("cuda", dtype, {"pack_linear": "triton"}).pack_linear
    multiply = pack(weight, torch.randn(outputs).to("cuda", dtype))
    together = multiply(x)
    for begin, end in ((0, 1), (1999, 2000), (5, 21), (70, 134), (100, 700)):
        for _ in range(20):  # programs end in another order
            assert torch.equal(multiply(x[begin:end]), together[begin:end])
