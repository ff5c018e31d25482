"""Moves blocks of the KV cache, in every layer: to host memory and back, and from one place in the cache to another.
May know: the attention layers' caches, host memory, the table of operations.
Must not know: whose blocks they are, or why they move."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ipc.messages import SchedulerOutput

Pairs = Sequence[tuple[int, int]]  # (from, to)
MEASURED_BLOCKS = 8


class BlockMover:
    """Owns the host blocks. `host_caches`: for each layer keys and values, each [num_host_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, layers: Sequence[Any], host_caches: Sequence[tuple[torch.Tensor, torch.Tensor]], ops: Any):
        device_caches = [cache for layer in layers for cache in (layer.key_cache, layer.value_cache)]
        self._device_caches = device_caches
        self._caches = list(zip(device_caches, (cache for pair in host_caches for cache in pair)))  # none without host blocks
        self._copy_blocks = ops.copy_blocks

    def move(self, step: SchedulerOutput) -> None:
        """Out first, since what comes in may take their places; copies last, since they may be of what came in."""
        if step.blocks_to_swap_out:
            self.swap_out(step.blocks_to_swap_out)
        if step.blocks_to_swap_in:
            self.swap_in(step.blocks_to_swap_in)
        if step.blocks_to_copy:
            pairs = torch.tensor(step.blocks_to_copy)
            for device in self._device_caches:
                self._copy_blocks(device, device, pairs)

    def swap_out(self, pairs: Pairs) -> None:
        """pairs: (device block, host block)"""
        index = torch.tensor(pairs)
        for device, host in self._caches:
            self._copy_blocks(device, host, index)

    def swap_in(self, pairs: Pairs) -> None:
        """pairs: (host block, device block)"""
        index = torch.tensor(pairs)
        for device, host in self._caches:
            self._copy_blocks(host, device, index)

    def measure(self) -> tuple[float, float]:
        """Seconds that a swap out and in takes whatever its size, and for each block. To be called while the cache holds nothing."""
        num_blocks = min(MEASURED_BLOCKS, *(len(cache) - 1 for pair in self._caches for cache in pair))
        one_s, all_s = (self._time([(block, block) for block in range(1, count + 1)]) for count in (1, num_blocks))
        per_block_s = max(0.0, all_s - one_s) / max(1, num_blocks - 1)
        return max(0.0, one_s - per_block_s), per_block_s

    def _time(self, pairs: Pairs) -> float:
        def both_ways() -> None:
            self.swap_out(pairs)
            self.swap_in(pairs)

        return shortest_time(both_ways)


def shortest_time(function: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds of the fastest of some runs: what the machine needs when nothing disturbs it. The first one, which sets things up, is not timed."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
