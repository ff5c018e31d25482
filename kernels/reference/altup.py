"""Specifies the operations of several streams, and of sparse activations.

Must not know: speed.
"""

import torch
from torch import Tensor

from ..registry import register

LEAST_MEAN_SQUARE = 1e-5  # of what match_magnitude scales


@register("stack_streams", name="reference", priority=0)
def stack_streams(x: Tensor, others: Tensor) -> Tensor:
    return torch.cat([x[:, None], others], 1)


@register("match_magnitude", name="reference", priority=0)
def match_magnitude(x: Tensor, like: Tensor) -> None:
    wide = x.float()
    wanted, own = (one.square().mean(-1, keepdim=True) for one in (like.float()[:, None], wide))
    x.copy_(wide * (wanted.sqrt() / own.clamp(min=LEAST_MEAN_SQUARE).sqrt()))


@register("altup_predict", name="reference", priority=0)
def altup_predict(streams: Tensor, routed: Tensor, weight: Tensor) -> Tensor:
    num_streams, wide = streams.shape[1], streams.float()
    factors = (routed.tanh() @ weight.T).view(-1, num_streams, num_streams)
    return (wide + factors @ wide).to(streams.dtype)


@register("altup_correct", name="reference", priority=0)
def altup_correct(
    streams: Tensor, activated: Tensor, routed: Tensor, weight: Tensor, active: int
) -> None:
    wide = streams.float()
    change = activated.float() - wide[:, active]
    factors = 1 + routed.tanh() @ weight.T
    streams.copy_(wide + factors[:, :, None] * change[:, None])


@register("gaussian_top_k", name="reference", priority=0)
def gaussian_top_k(x: Tensor, deviations: float) -> None:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    deviation = (wide - mean).square().mean(-1, keepdim=True).sqrt()
    x.copy_((wide - (mean + deviations * deviation)).relu())
