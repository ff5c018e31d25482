"""Replaces norms and gated MLPs of transformers by Quire's operations where both compute the same.
A comparison on random input decides that.

Must not know: architectures, files, requests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..layers import LayerFactory
from .modules import MergedLinear, QuireLinear, put

EQUAL_SHARE = (
    0.98  # of results that agree in every bit; another order of rounding changes a quarter
)
Gate = Callable[[torch.Tensor], torch.Tensor]  # a linear layer, or what follows it
ROWS, SIZE, INNER = 16, 32, 64  # of random input


class QuireNorm(nn.Module):
    """Takes the place of an RMS norm. The original module keeps the weight."""

    def __init__(self, original: nn.Module, make: LayerFactory, offset: float, is_wide: bool):
        super().__init__()
        self.__dict__["original"] = original
        self.eps, self.dtype, self.rms_norm = epsilon(original), make.dtype, make.ops.rms_norm
        self.offset, self.is_wide = offset, is_wide
        self.__dict__["scale"] = None

    def prepare(self) -> None:
        """Reads the original's weight. Call it when the weight is there."""
        original: Any = self.original
        weight = original.weight
        self.__dict__["scale"] = weight.data.float() + self.offset if self.is_wide else weight.data

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.dtype or x.stride(-1) != 1:
            original: Any = self.original
            return original(x)
        if x.dim() == 3:  # [1, T, H]: threads divide T
            return self.rms_norm(x.flatten(0, 1), self.scale, self.eps).view(x.shape)
        return self.rms_norm(x, self.scale, self.eps)


class QuireMLP(nn.Module):
    """Takes the place of down(activation(gate(x)) * up(x))."""

    def __init__(self, original: Any, activation: Gate, make: LayerFactory):
        super().__init__()
        self.gate_up, self.down = original.gate_proj.merged.linear, original.down_proj.linear
        self.activation = activation
        # a user's kernel for the activation must not be bypassed
        self.may_fuse = (
            activation is make.ops.silu_and_mul and make.ops.chosen["silu_and_mul"] == "native"
        )
        self.gated: Gate = self._gated

    def prepare(self) -> None:
        """Chooses the operation. Call it when the weights are there."""
        if self.may_fuse and (fused := self.gate_up.silu_and_mul) is not None:
            self.gated = fused

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.gate_up(x))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = self.down(self.gated(x.reshape(-1, x.shape[-1])))
        return product.view(*x.shape[:-1], product.shape[-1])


def replace_faster(model: nn.Module, make: LayerFactory) -> list[QuireNorm | QuireMLP]:
    """Replaces what it can, after replace_modules. The caller prepares each module that it returns
    when the weights are there.
    """
    replaced: list[QuireNorm | QuireMLP] = []
    kinds: dict[tuple[Any, ...], tuple[float, bool] | None] = {}
    for name, module in list(model.named_modules()):
        if is_norm(module):
            kind = type(module), epsilon(module)
            if kind not in kinds:
                kinds[kind] = norm_form(module, make)
            if (form := kinds[kind]) is not None:
                replaced.append(QuireNorm(module, make, *form))
                put(model, name, replaced[-1])
        elif is_gated(module) and (activation := gated_form(module, make)) is not None:
            replaced.append(QuireMLP(module, activation, make))
            put(model, name, replaced[-1])
    return replaced


def is_norm(module: Any) -> bool:
    weight = module._parameters.get("weight")
    return (
        "RMSNorm" in type(module).__name__
        and list(module._parameters) == ["weight"]
        and weight is not None
        and weight.dim() == 1
        and not module._modules
        and epsilon(module) is not None
    )


def epsilon(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def norm_form(module: Any, make: LayerFactory) -> tuple[float, bool] | None:
    """What is added to the weight, and whether it is multiplied in fp32. None: the module computes
    something else.
    """
    generator = torch.Generator().manual_seed(0)
    place = make.device, make.dtype
    x = (3 * torch.randn(ROWS, SIZE, generator=generator)).to(*place)
    weight = (1 + 0.3 * torch.randn(SIZE, generator=generator)).to(*place)
    probe = copy.copy(module)
    probe._parameters = {"weight": nn.Parameter(weight, requires_grad=False)}
    try:
        expected = type(module).forward(probe, x)
    except Exception:  # it needs more than its input
        return None
    for offset, is_wide in ((0.0, False), (0.0, True), (1.0, True)):
        scale = weight.float() + offset if is_wide else weight
        if agree(make.ops.rms_norm(x, scale, epsilon(module)), expected):
            return offset, is_wide
    return None


def is_gated(module: Any) -> bool:
    children = module._modules
    gate, up, down = (children.get(f"{name}_proj") for name in ("gate", "up", "down"))
    return (
        isinstance(gate, MergedLinear)
        and isinstance(up, MergedLinear)
        and gate.merged is up.merged
        and type(down) is QuireLinear
        and not module._parameters
    )


class _Probe:
    """A module whose projections are small random ones."""

    def __init__(self, module: nn.Module, **projections: Callable):
        self.__dict__.update(projections, module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def gated_form(module: nn.Module, make: LayerFactory) -> Callable | None:
    """The operation between the projections. None: the module computes something else."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, generator=generator)
        values = values / SIZE**0.5 if shape[0] == SIZE else values
        return values.to(make.device, make.dtype)

    x, gate, up, down = random(ROWS, SIZE), *(random(SIZE, INNER) for _ in "ab"), random(INNER, 1)
    probe: Any = _Probe(
        module,
        gate_proj=lambda x: x @ gate,
        up_proj=lambda x: x @ up,
        down_proj=lambda x: x * down.view(-1),
    )
    try:
        expected = type(module).forward(probe, x)
    except Exception:  # it needs more than its input
        return None
    gated = torch.cat((x @ gate, x @ up), -1)
    for operation in (make.ops.silu_and_mul, make.ops.gelu_tanh_and_mul):
        if agree(operation(gated) * down.view(-1), expected):
            return operation
    return None


def agree(replaced: torch.Tensor, original: Any) -> bool:
    """Whether results are equal up to the order of sums. In bf16, nearly all of them must agree in
    every bit.
    """
    if not isinstance(original, torch.Tensor) or replaced.shape != original.shape:
        return False
    if replaced.dtype != original.dtype:
        return False
    if replaced.dtype == torch.float32:
        return torch.allclose(replaced, original, rtol=1e-5, atol=1e-5)
    is_near = torch.allclose(replaced.float(), original.float(), rtol=2**-7, atol=1e-6)
    return is_near and bool((replaced == original).float().mean() >= EQUAL_SHARE)
