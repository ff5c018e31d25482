"""Specifies int8 and int4 linear layers: the integers, scales and summation order of the fast
implementations.

Must not know: speed.

A fused multiply-add rounds once. Here it is computed in fp64 and rounded to fp32, which differs in
one case in 2**29.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry import register

GROUP = {8: 256, 4: 64}  # weights along k, by bits
LEAST = 1e-30  # a group whose values are all smaller counts as zeros


class QuantizedLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int):
        self.bias = bias
        self.dtype = weight.dtype
        self.in_features = weight.shape[1]
        self.group = GROUP[bits]
        quantize = quantize_int8 if bits == 8 else quantize_int4
        # [N, groups, group] integers, [N, groups]
        self.numbers, self.scales = quantize(in_groups(weight.float(), self.group))

    def __call__(self, x: Tensor) -> Tensor:
        return self.logits(x).to(self.dtype)

    def logits(self, x: Tensor) -> Tensor:
        numbers, scales = quantize_activations(in_groups(x.float(), self.group))
        total = torch.zeros(len(x), len(self.numbers))
        for group in range(self.scales.shape[1]):
            exact = numbers[:, group].double() @ self.numbers[:, group].double().T
            total = fused(exact.float(), self.scales[:, group] * scales[:, group, None], total)
        return total if self.bias is None else total + self.bias.float()

    def embedding(self, token_ids: Tensor) -> Tensor:
        # Integers have no -0.0.
        rows = (self.numbers[token_ids.long()] + 0.0) * self.scales[token_ids.long()].unsqueeze(-1)
        return rows.flatten(1)[:, : self.in_features].to(self.dtype)


@register("pack_quantized_linear", name="reference", priority=0)
def pack_quantized_linear(weight: Tensor, bias: Tensor | None, bits: int) -> QuantizedLinear:
    return QuantizedLinear(weight, bias, bits)


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c, rounded once"""
    return (a.double() * b.double() + c.double()).float()


def in_groups(x: Tensor, group: int) -> Tensor:
    """[rows, k] -> [rows, groups, group], padded with zeros"""
    return F.pad(x, (0, -x.shape[1] % group)).unflatten(1, (-1, group))


def quantize_activations(x: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, groups, group] -> integers in +-127 and scales [rows, groups]; NaN where a group is
    not finite.
    """
    finite, largest = x.isfinite().all(-1), x.abs().amax(-1)
    counts = finite & (largest > LEAST)
    scales = torch.where(counts, largest / 127, 0.0)
    # `127 / largest` would round twice.
    factors = torch.where(counts, torch.full_like(largest, 127) / largest, 0.0)
    numbers = (x * factors.unsqueeze(-1)).nan_to_num().round().clamp(-127, 127)
    return numbers, torch.where(finite, scales, float("nan"))


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    finite = weight.isfinite().all(-1)
    scales = (weight.abs().amax(-1) / 127).bfloat16().float()
    factors = torch.where(scales >= LEAST, 1 / scales, 0.0)
    numbers = (weight * factors.unsqueeze(-1)).nan_to_num().round().clamp(-127, 127)
    return numbers, torch.where(finite, scales, float("nan"))


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns products of integers in -8 to 7 and a factor in +-15 per half group, and scales."""
    numbers, factors, scales = find_int4(weight)
    return (numbers * factors.unsqueeze(-1)).flatten(-2), scales


def find_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Searches the group's scale. weight [rows, groups, group] -> integers in -8 to 7 [rows,
    groups, 2, group / 2], factors in +-15 of both halves [rows, groups, 2], scales [rows, groups].
    """
    finite, halves = weight.isfinite().all(-1), weight.unflatten(-1, (2, -1)).nan_to_num()
    high, low = halves.amax(-1), halves.amin(-1)
    wanted = torch.where(high > -low, high, low) / -8  # maps the weight of largest magnitude to -8
    largest = wanted.abs().amax(-1)
    counts = largest > LEAST
    best_error = torch.full_like(largest, torch.inf)
    best_scale = torch.zeros_like(largest)
    best_factors = torch.ones_like(wanted)
    for steps in (15.0, 13.5, 12.0):
        scale = torch.where(counts, (largest / steps).bfloat16().float(), 1.0)
        factors, errors = _find_factors(halves, wanted, scale.unsqueeze(-1))
        error = errors[..., 0] + errors[..., 1]
        better = counts & (error < best_error)
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_factors = torch.where(better.unsqueeze(-1), factors, best_factors)
    step = best_scale.unsqueeze(-1) * best_factors
    inverse = torch.where(step == 0, 0.0, 1 / step).unsqueeze(-1)
    numbers = (halves * inverse).round().clamp(-8, 7)
    return numbers, best_factors, torch.where(finite, best_scale, float("nan"))


def _find_factors(halves: Tensor, wanted: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the best factor of each half, and its squared error."""
    best_error, best = torch.full_like(wanted, torch.inf), torch.ones_like(wanted)
    for beside in (-1, 0, 1):
        factor = ((wanted / scale).round() + beside).clamp(-15, 15)
        factor = torch.where(factor == 0, 1.0, factor)
        step, error = factor * scale, torch.zeros_like(wanted)
        for w in halves.unbind(-1):
            rest = fused((w * (1 / step)).round().clamp(-8, 7), -step, w)
            error = fused(rest, rest, error)
        better = error < best_error
        best_error, best = torch.where(better, error, best_error), torch.where(better, factor, best)
    return best, best_error
