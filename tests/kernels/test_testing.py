"""check_operation finds what authors of kernels get wrong."""

import pytest
import quire
import torch
from quire.kernels import registry
from quire.kernels.registry import register, unregister
from quire.kernels.testing import check_operation
from torch import Tensor

X, WEIGHT = torch.randn(5, 64), torch.randn(64)


def right(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def depends_on_other_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return right(x, weight, eps) * (1 + 1e-6 * (len(x) - 1))


WRONG = {
    "differs by up to": lambda x, weight, eps: right(x, weight, eps) * 1.01,
    r"is \[5, 32\] torch.float32, the reference's \[5, 64\]": (
        lambda x, weight, eps: right(x, weight, eps)[:, :32]
    ),
    "float64": lambda x, weight, eps: right(x, weight, eps).double(),
    "argument 0 differs": lambda x, weight, eps: right(x, weight, eps) + 0 * x.mul_(2),
    "returns": lambda x, weight, eps: None,
    "other bits alone": depends_on_other_rows,
}


@pytest.fixture
def registered(request):
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return request.param(x, weight, eps)

    register("rms_norm", name="mine", priority=-1)(rms_norm)
    yield
    unregister("rms_norm", "mine")


@pytest.mark.parametrize("registered", [right], indirect=True)
def test_a_right_kernel_passes(registered):
    check_operation("rms_norm", "mine", [(X, WEIGHT, 1e-6), (X[:1], WEIGHT, 0.1)], rows=(0,))
    assert quire.testing.check_operation is check_operation


@pytest.mark.parametrize(
    ("registered", "problem"),
    [(function, problem) for problem, function in WRONG.items()],
    indirect=["registered"],
)
def test_a_wrong_kernel_is_named(registered, problem):
    with pytest.raises(AssertionError, match=f"rms_norm, implementation 'mine', call 0.*{problem}"):
        check_operation("rms_norm", "mine", [(X, WEIGHT, 1e-6)], rows=(0,))


def test_every_implementation_here_passes():
    for one in registry.implementations("rms_norm"):
        if one.predicate(registry.Facts("cpu", torch.float32)):
            check_operation("rms_norm", one.name, [(X, WEIGHT, 1e-6)])
    pack = [one.name for one in registry.implementations("pack_linear")]
    assert "cpu" in pack
    weight = torch.randn(8, 64)
    check_operation("pack_linear", "cpu", [(weight, None)], packed=(X,), atol=1e-4)


def test_an_unknown_name_lists_what_there_is():
    with pytest.raises(AssertionError, match="no implementation 'mine'; there are: .*'reference'"):
        check_operation("rms_norm", "mine", [])
