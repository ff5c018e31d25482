"""Where a waiting request would start, and whether there is room for it.

Must not know: the queues and their order, slots, the step being made; nothing is changed here.
"""

from __future__ import annotations

from typing import NamedTuple

from ..forks import Family
from ..kv_cache.block_pool import KVCacheBlock
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..request import Request


class Start(NamedTuple):
    """Where an admitted request starts: its first `num_tokens` tokens are already computed."""

    num_tokens: int
    blocks: list[KVCacheBlock]  # that hold the beginning of them
    source: KVCacheBlock | None = None  # holds the rest for another request, and is to be copied
    is_fork: bool = False  # they belong to a sibling, whatever the prefix cache holds


def find_start(manager: KVCacheManager, request: Request) -> Start | None:
    """The tokens that need not be computed: cached ones, those it had when it was swapped out,
    or the
    prompt of its family.

    None: it must wait until the family's first member has computed the prompt.
    """
    family = request.family
    if family is not None and not request.num_output_tokens and not request.num_swapped_tokens:
        start = _find_prompt(manager, request, family)
        if start is not None or family.first is not request:
            return start
    blocks = manager.get_computed_blocks(request)
    return Start(max(len(blocks) * manager.block_size, request.num_swapped_tokens), blocks)


def _find_prompt(manager: KVCacheManager, request: Request, family: Family) -> Start | None:
    """All but the last token of the prompt, whose logits each member needs for its own sample."""
    num_tokens = request.num_prompt_tokens - 1
    num_full_blocks, num_more = divmod(num_tokens, manager.block_size)
    if family.parked is not None and manager.holds_parked(family.parked):
        blocks = family.parked.blocks
    elif (source := family.find_source()) is not None:
        blocks = manager.get_blocks(source, num_full_blocks + (num_more > 0))
    else:
        return None
    if not num_more:
        return Start(num_tokens, blocks, is_fork=True)
    if blocks[-1].ref_cnt == 0:
        # No request holds the partial block, so the request takes it instead of a copy: a free
        # block could be reallocated before it is copied.
        return Start(num_tokens, blocks, is_fork=True)
    return Start(num_tokens, blocks[:-1], blocks[-1], is_fork=True)


def num_missing_blocks(block_size: int, request: Request) -> int:
    """Blocks that a running request still needs for its known tokens."""
    num_missing = -(-request.num_tokens // block_size) - -(
        -request.num_computed_tokens // block_size
    )
    return max(0, num_missing)


def has_room(manager: KVCacheManager, num_reserved: int, request: Request, start: Start) -> bool:
    """Whether all tokens of the request fit beside the `num_reserved` blocks that running ones
    still
    need.

    Otherwise prompts computed in chunks would be admitted together and preempt each other half-way.
    If no request runs, it always fits.
    """
    num_needed = -(-request.num_tokens // manager.block_size) - len(start.blocks)
    return manager.num_free_after(num_needed + num_reserved, start.blocks) >= 0
