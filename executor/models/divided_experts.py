"""A layer's experts of which each engine has some: rows go where their experts are, and back.

Must not know: architectures, how engines reach each other.

The result has the bits of `fused_moe` with all experts: an expert returns the same numbers for a
row in any company, and the row's engine adds them in the order of the row's ids.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.moe import Experts
from ..ranks.expert_group import ExpertGroup


class DividedExperts:
    """Called as `fused_moe`, with the experts that this engine has."""

    def __init__(self, ops: Any, group: ExpertGroup, share: int):
        """share: how many experts each engine has; the first engine has the first ones."""
        self.ops, self._group, self._share = ops, group, share

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        """x [T, H], ids [T, K] i32 of all experts, weights [T, K] fp32 -> [T, H]"""
        group = self._group
        all_x, all_ids, num_rows = group.gather(x, ids)
        is_mine = all_ids // self._share == group.rank
        rows, slots = is_mine.nonzero(as_tuple=True)  # in the order of engines, rows and slots
        own_ids = all_ids[rows, slots] - group.rank * self._share
        returned = self.ops.expert_outputs(all_x[rows], own_ids[:, None], experts)[:, 0]
        sent = [int(of_engine.sum()) for of_engine in is_mine.split(num_rows)]
        engine_of = (ids.flatten() // self._share).long()
        received = torch.bincount(engine_of, minlength=group.size).tolist()
        places = engine_of.argsort(stable=True)
        by_slot = torch.empty(len(places), x.shape[1])
        by_slot[places] = group.scatter(returned, sent, received)
        return self.ops.weighted_sum(by_slot.view(*ids.shape, -1), weights, x.dtype)
