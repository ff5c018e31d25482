"""Writes to the paged KV cache on the CPU and copies its blocks.

Must not know: models, requests.
"""

import torch
from torch import Tensor

from ..registry import register
from .device import PRIORITY, has_plain_cache, is_cpu


@register("reshape_and_cache", name="cpu", predicate=has_plain_cache, priority=PRIORITY)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        stored = (slot_mapping >= 0).nonzero().flatten()
        key, value, slot_mapping = key[stored], value[stored], slot_mapping[stored]
    block_size, row = key_cache.shape[1], key_cache.stride(1)
    if not key_cache.is_contiguous():  # other layers have parts of the same blocks
        places = slot_mapping // block_size, slot_mapping % block_size
        key_cache[places], value_cache[places] = key, value
        return
    # One token's heads form a row of a matrix, because `index_copy_` is a third faster in two
    # dimensions than in three.
    key_cache.view(-1, row).index_copy_(0, slot_mapping, key.flatten(1))
    value_cache.view(-1, row).index_copy_(0, slot_mapping, value.flatten(1))


@register("copy_blocks", name="cpu", predicate=is_cpu, priority=PRIORITY)
def copy_blocks(sources: list[Tensor], destinations: list[Tensor], pairs: Tensor) -> None:
    from_blocks, to_blocks = pairs.T.contiguous()
    for source, destination in zip(sources, destinations, strict=True):
        if source.element_size() == 1:  # torch cannot copy rows of fp8
            source, destination = source.view(torch.uint8), destination.view(torch.uint8)
        destination.flatten(1).index_copy_(
            0, to_blocks, source.flatten(1).index_select(0, from_blocks)
        )
