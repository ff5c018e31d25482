"""Where a waiting request would start, and whether there is room for it.

Must not know: the queues and their order, slots, the step being made; nothing is changed here.
"""

from __future__ import annotations

from typing import NamedTuple

from ...ipc.models.kv_layout import KVLayout
from ..forks import Family
from ..kv_cache.block_pool import Blocks, KVCacheBlock
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..request import Request


class StartPoint(NamedTuple):
    """Where an admitted request starts: its first `num_tokens` tokens are already computed."""

    num_tokens: int
    blocks: Blocks  # that hold the beginning of them
    # of each group, the block that holds the rest for another request, and is to be copied
    source: list[KVCacheBlock] | None = None
    is_fork: bool = False  # they belong to a sibling, whatever the prefix cache holds
    num_loaded: int = 0  # blocks after `blocks` that are to be loaded


def find_start(manager: KVCacheManager, request: Request) -> StartPoint | None:
    """The tokens that need not be computed: cached ones, those it had when it was swapped out,
    or the prompt of its family.

    None: it must wait until the family's first member has computed the prompt.
    """
    if request.num_swapped_tokens:
        return _find_swapped(manager, request)
    family = request.family
    if family is not None and not request.num_output_tokens:
        start = _find_prompt(manager, request, family)
        if start is not None or family.waits_for_prompt(request):
            return start
    blocks = manager.get_computed_blocks(request)
    num_loaded = 0 if manager.offload is None else manager.count_offloaded(request, blocks)
    num_tokens = (len(blocks[0]) + num_loaded) * manager.block_size
    return StartPoint(num_tokens, blocks, num_loaded=num_loaded)


def _find_swapped(manager: KVCacheManager, request: Request) -> StartPoint:
    """Its tokens in host memory count as computed; of those that are cached, nothing is copied."""
    blocks = manager.get_computed_blocks(request)
    num_cached = len(blocks[0]) * manager.block_size
    return StartPoint(max(num_cached, request.num_swapped_tokens), blocks)


def _find_prompt(manager: KVCacheManager, request: Request, family: Family) -> StartPoint | None:
    """All but the last token of the prompt, whose logits each member needs for its own sample.

    None if no member has it, or if a window has left it.
    """
    num_tokens = request.num_prompt_tokens - 1
    blocks = None
    if family.parked is not None and manager.holds_parked(family.parked):
        blocks = family.parked.blocks
    elif (source := family.find_source()) is not None:
        blocks = manager.get_blocks(source, num_tokens)
    if blocks is None:
        return None
    if num_tokens % manager.block_size == 0:
        return StartPoint(num_tokens, blocks, is_fork=True)
    if blocks[0][-1].ref_cnt == 0:
        # No request holds the partial block, so the request takes it instead of a copy: a free
        # block could be reallocated before it is copied.
        return StartPoint(num_tokens, blocks, is_fork=True)
    return StartPoint(
        num_tokens, [row[:-1] for row in blocks], [row[-1] for row in blocks], is_fork=True
    )


def num_missing_blocks(layout: KVLayout, request: Request) -> int:
    """Blocks that a running request still needs for its known tokens."""
    return layout.missing_blocks(
        request.num_tokens, request.num_computed_tokens, request.num_executed_tokens
    )


def has_room(
    manager: KVCacheManager, num_reserved: int, request: Request, start: StartPoint
) -> bool:
    """Whether all tokens of the request fit beside the `num_reserved` blocks that running ones
    still need.

    Otherwise prompts computed in chunks would be admitted together and preempt each other half-way.
    If no request runs, it always fits.
    """
    num_needed = manager.num_needed(request.num_tokens, start.blocks)
    return manager.num_free_after(num_needed + num_reserved, start.blocks) >= 0
