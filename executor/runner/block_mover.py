"""Moves KV-cache blocks in every layer: to host memory and back, and within the cache.

Must not know: whose blocks they are, or why they move.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...ipc.step_messages import SchedulerOutput
from ...kernels.registry import OpTable
from ..device import synchronize
from ..model import AttentionLayer
from ..preemption_costs import shortest_time

Pairs = Sequence[tuple[int, int]]  # (from, to)
MEASURED_BLOCKS = 8


class BlockMover:
    """Owns the host blocks.

    `host_caches`: memory of host blocks in the order of caches_of; empty without swapping.
    `layers`: all that have a part of each block.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        host_caches: Sequence[torch.Tensor],
        ops: OpTable,
    ):
        self._layers = layers
        self._host_caches = list(host_caches)
        self._copy_blocks = ops.copy_blocks

    def move(self, step: SchedulerOutput) -> None:
        """Swaps out first, since swapped-in blocks may take their places; copies last, since they
        may read swapped-in blocks.
        """
        if step.blocks_to_swap_out:
            self.swap_out(step.blocks_to_swap_out)
        if step.blocks_to_swap_in:
            self.swap_in(step.blocks_to_swap_in)
        if step.blocks_to_copy:
            caches = caches_of(self._layers)
            self._copy_blocks(caches, caches, torch.tensor(step.blocks_to_copy))

    def swap_out(self, pairs: Pairs) -> None:
        """pairs: (device block, host block)"""
        self._copy_blocks(caches_of(self._layers), self._host_caches, torch.tensor(pairs))

    def swap_in(self, pairs: Pairs) -> None:
        """pairs: (host block, device block)"""
        self._copy_blocks(self._host_caches, caches_of(self._layers), torch.tensor(pairs))

    def measure(self) -> tuple[float, float]:
        """Seconds for a swap out and in of any size, and per block.

        Call it while the cache is empty. Blocks without bytes take no time.
        """
        if not self._host_caches:
            return 0.0, 0.0
        most = min(MEASURED_BLOCKS, len(self._host_caches[0]), len(self._layers[0].key_cache) - 1)
        one_s, all_s = (self._time(count) for count in (1, most))
        per_block_s = max(0.0, all_s - one_s) / max(1, most - 1)
        return max(0.0, one_s - per_block_s), per_block_s

    def _time(self, num_blocks: int) -> float:
        def both_ways() -> None:
            self.swap_out([(block + 1, block) for block in range(num_blocks)])
            self.swap_in([(block, block + 1) for block in range(num_blocks)])
            synchronize(self._layers[0].key_cache.device)

        return shortest_time(both_ways)


def caches_of(layers: Sequence[AttentionLayer]) -> list[torch.Tensor]:
    """The memory of all blocks, each [num_blocks, ...] and contiguous: the keys and the values of
    each page or, if layers' caches are parts of blocks, the blocks. Layers of different groups have
    the same memory.
    """
    parts = [cache for layer in layers for cache in (layer.key_cache, layer.value_cache)]
    caches = [_blocks_of(cache) for cache in parts if cache is not None]
    return [*{cache.data_ptr(): cache for cache in caches}.values()]


def _blocks_of(cache: torch.Tensor) -> torch.Tensor:
    """The cache, or the blocks [num_blocks, numbers] of which it is a part."""
    if cache.is_contiguous():
        return cache
    apart = cache.stride(0)
    return cache.as_strided((len(cache), apart), (apart, 1), 0)
