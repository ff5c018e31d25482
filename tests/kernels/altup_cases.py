"""Inputs for the operations of several streams and of sparse activations, and the same operations
written with torch.
"""

from __future__ import annotations

import torch
from quire.tests.kernels.case import Case, rand
from torch import Tensor

SIZES = [(1, 4, 64), (5, 4, 200), (33, 3, 17), (3, 16, 40), (2, 2, 2048), (0, 4, 8)]


def stack_streams(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, others: Tensor) -> tuple[Tensor, ...]:
        return (torch.stack([x, *others.unbind(1)], 1),)

    def case(tokens: int, count: int, size: int) -> Case:
        joined = rand(tokens, 1 + count, size, dtype=dtype)
        args = joined[:, -1], joined[:, :-1]
        return Case(f"{tokens} x {count} x {size}", args, own)

    return [case(*one) for one in SIZES]


def match_magnitude(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, like: Tensor) -> tuple[Tensor, ...]:
        wanted, found = (one.square().mean(-1, keepdim=True) for one in (like[:, None], x))
        return (x * wanted.sqrt() / torch.where(found < 1e-5, 1e-5, found).sqrt(),)

    def case(tokens: int, count: int, size: int, scale: float) -> Case:
        joined = rand(tokens, 1 + count, size, dtype=dtype)
        args = scale * joined[:, 1:], joined[:, 0]
        return Case(f"{tokens} x {count} x {size}, {scale}", args, own, in_place=(0,))

    strided = rand(9, 2, 4, 24, dtype=dtype)
    views = Case("strided", (strided[:, 1, 1:], strided[:, 0, 2]), own, in_place=(0,))
    return [case(*one, scale) for one in SIZES for scale in (3.0, 1e-4)] + [views]


def factors_of(weight: Tensor, routed: Tensor) -> Tensor:
    return torch.einsum("np,tp->tn", weight, routed.tanh())


def random_router(tokens: int, count: int, num_factors: int) -> tuple[Tensor, Tensor]:
    """What the router gives [tokens, count], and the weight [num_factors, count]."""
    return 2 * torch.randn(tokens, count), torch.randn(num_factors, count)


def altup_predict(dtype: torch.dtype) -> list[Case]:
    def own(streams: Tensor, routed: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        count = streams.shape[1]
        factors = factors_of(weight, routed).view(-1, count, count)
        return (streams + torch.einsum("tij,tjh->tih", factors.to(streams.dtype), streams),)

    def case(tokens: int, count: int, size: int) -> Case:
        streams = rand(tokens, count + 1, size + 8, dtype=dtype)[:, 1:, 8:]
        args = streams, *random_router(tokens, count, count * count)
        return Case(f"{tokens} x {count} x {size}", args, own)

    return [case(*one) for one in SIZES]


def altup_correct(dtype: torch.dtype) -> list[Case]:
    def own(
        streams: Tensor, activated: Tensor, routed: Tensor, weight: Tensor, active: int
    ) -> tuple[Tensor, ...]:
        change = activated - streams[:, active]
        factors = 1 + factors_of(weight, routed).to(streams.dtype)
        return (streams + factors[:, :, None] * change[:, None],)

    def case(tokens: int, count: int, size: int, active: int) -> Case:
        joined = rand(tokens, count + 1, size, dtype=dtype)
        streams, activated = joined[:, :-1], joined[:, -1]
        args = streams, activated, *random_router(tokens, count, count), active
        return Case(f"{tokens} x {count} x {size}, {active}", args, own, in_place=(0,))

    return [case(*one, active) for one in SIZES for active in (0, one[1] - 1)]


def gaussian_top_k(dtype: torch.dtype) -> list[Case]:
    def own(x: Tensor, deviations: float) -> tuple[Tensor, ...]:
        mean = x.mean(-1, keepdim=True)
        deviation = (x - mean).square().mean(-1, keepdim=True).sqrt()
        return ((x - (mean + deviations * deviation)).relu(),)

    def case(tokens: int, size: int, deviations: float) -> Case:
        x = rand(tokens, 2 * size, dtype=dtype)[:, :size] + 0.5
        return Case(f"{tokens} x {size}, {deviations}", (x, deviations), own, in_place=(0,))

    sizes = [(1, 64), (5, 96), (33, 17), (3, 5000), (0, 8)]
    return [case(*one, deviations) for one in sizes for deviations in (1.6449, -0.3)]


ALTUP_OPS = {
    f.__name__: f
    for f in (stack_streams, match_magnitude, altup_predict, altup_correct, gaussian_top_k)
}
