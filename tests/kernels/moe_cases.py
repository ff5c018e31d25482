"""Inputs for the operations of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from quire.kernels import registry
from quire.kernels.moe import UNGATED, ClampedSwiGLU, Experts
from quire.tests.kernels.case import Case, DenseLayer, rand
from torch import Tensor

ACTIVATIONS = {"silu": F.silu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
CLAMPED = ClampedSwiGLU(1.702, 0.7)  # a limit that many numbers exceed
Biases = tuple[Tensor, Tensor] | None  # [E, 2 I] and [E, H]


def experts_of(
    gate_up: Tensor,
    down: Tensor,
    activation: str | ClampedSwiGLU,
    bits: int | None = None,
    biases: Biases = None,
) -> Experts:
    """gate_up [E, 2 I, H], down [E, H, I], packed by the default kernels."""
    ops = registry.select("cpu", gate_up.dtype)

    def pack(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        if bits is None:
            return ops.pack_linear(weight, bias)
        return ops.pack_quantized_linear(weight, bias, bits)

    return Experts(*packed(pack, gate_up, down, biases), activation)


def packed(pack: Callable, gate_up: Tensor, down: Tensor, biases: Biases) -> list[list]:
    of_parts = biases or ([None] * len(gate_up), [None] * len(down))
    return [
        [pack(weight, bias) for weight, bias in zip(weights, of_part, strict=True)]
        for weights, of_part in zip((gate_up, down), of_parts, strict=True)
    ]


def random_ids(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    """[T, K] i32, different in each row"""
    order = torch.rand(num_tokens, num_experts).argsort(-1)
    return order[:, :top_k].int()


def fused_moe(dtype: torch.dtype) -> list[Case]:
    class Packed(Case):
        """Packs the weights, then runs the experts."""

        def call(self, function: Callable, args: list[Any]) -> Tensor:
            x, ids, weights, gate_up, down, activation, *biases = args
            of_parts = (biases[0], biases[1]) if biases else None
            if getattr(function, "is_on_gpu", False):
                experts = Experts(*packed(DenseLayer, gate_up, down, of_parts), activation)
            else:
                experts = experts_of(gate_up, down, activation, biases=of_parts)
            with torch.inference_mode():
                return function(x, ids, weights.float(), experts)

    def own(
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        activation: str | ClampedSwiGLU,
        *biases: Tensor,
    ) -> tuple[Tensor, ...]:
        total = torch.zeros_like(x)
        of_gate_up, of_down = biases or (gate_up.new_zeros(gate_up.shape[:2]), [0.0] * len(down))
        for token, row in enumerate(x):
            for weight, expert in zip(weights[token], ids[token].tolist()):
                product = gate_up[expert] @ row + of_gate_up[expert]
                gate, up = product.chunk(2)
                if activation in UNGATED:
                    inner = product.relu().square()
                elif isinstance(activation, ClampedSwiGLU):
                    gate, up = gate.clamp(max=activation.limit), up.clamp(-0.7, 0.7)
                    inner = gate * (1.702 * gate).sigmoid() * (up + 1)
                else:
                    inner = ACTIVATIONS[activation](gate) * up
                total[token] += weight * (down[expert] @ inner + of_down[expert])
        return (total,)

    def case(
        name: str,
        ids: Tensor,
        num_experts: int,
        hidden: int,
        inner: int,
        activation: str | ClampedSwiGLU = "silu",
        has_biases: bool = False,
    ) -> Case:
        first = inner if activation in UNGATED else 2 * inner
        gate_up, down = (
            (torch.randn(num_experts, n, k) / k**0.5).to(dtype)
            for n, k in ((first, hidden), (hidden, inner))
        )
        x, weights = rand(len(ids), hidden, dtype=dtype), torch.rand(ids.shape) + 0.1
        biases = [rand(num_experts, n, dtype=dtype) for n in (first, hidden) if has_biases]
        return Packed(name, (x, ids, weights, gate_up, down, activation, *biases), own)

    one = torch.full((70, 1), 2, dtype=torch.int32)
    return [
        case("one token", random_ids(1, 8, 3), 8, 64, 48),
        case("experts without rows", random_ids(5, 16, 2), 16, 96, 32, "gelu_tanh"),
        case("all tokens on one expert", one, 4, 64, 32),
        case("every expert", random_ids(9, 4, 4), 4, 100, 64),
        case("many rows", random_ids(150, 6, 2), 6, 64, 80),
        case("no token", random_ids(0, 4, 2), 4, 64, 32),
        case("biases", random_ids(9, 4, 2), 4, 64, 48, has_biases=True),
        case("no gates", random_ids(70, 8, 3), 8, 64, 40, "relu_squared"),
        case("no gates, biases", random_ids(9, 4, 2), 4, 48, 33, "relu_squared", has_biases=True),
        case("clamped", random_ids(70, 8, 3), 8, 64, 40, CLAMPED),
        case("clamped, biases", random_ids(13, 5, 4), 5, 96, 32, CLAMPED, has_biases=True),
    ]


def add_gated(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, gate: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        return (out + gate.sigmoid() * x,)

    class Gated(Case):
        def call(self, function: Callable, args: list[Any]) -> None:
            function(args[0], args[1].float(), args[2])

    def case(name: str, x: Tensor, out: Tensor) -> Case:
        return Gated(name, (x, 3 * torch.randn(len(x), 1), out), own, in_place=(2,))

    wide = rand(5, 80, dtype=dtype)[:, 3:70]
    shapes = [(1, 2), (33, 100), (4, 2048)]
    return [
        *(case(f"{s}", rand(*s, dtype=dtype), rand(*s, dtype=dtype)) for s in shapes),
        case("strided", rand(5, 67, dtype=dtype), wide),
    ]
