"""Where a waiting request would start, and whether there is room for it.

Must not know: the queues and their order, slots, the step being made; nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ...ipc.models.kv_layout import KVLayout
from ..forks import Family
from ..kv_cache.block_pool import Blocks, KVCacheBlock
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..kv_cache.state_checkpoints import Checkpoint, StateCheckpoints
from ..request import Request


class StartPoint(NamedTuple):
    """Where an admitted request starts: its first `num_tokens` tokens are already computed."""

    num_tokens: int
    blocks: Blocks  # that hold the beginning of them
    # of each group, the block that holds the rest for another request, and is to be copied
    source: list[KVCacheBlock] | None = None
    is_fork: bool = False  # they belong to a sibling, whatever the prefix cache holds
    missing: Sequence[tuple[int, int]] = ()  # of `blocks`, those that are to be loaded: FoundBlocks
    # of a model that keeps states: the state after these tokens, unless the request brings its own
    # or begins with the first token; and how many tokens there are blocks for
    checkpoint: Checkpoint | None = None
    loaded_state: bytes | None = None  # in place of `checkpoint`: the name of one to be loaded
    num_shared: int = 0


def find_start(manager: KVCacheManager, request: Request) -> StartPoint | None:
    """The tokens that need not be computed: cached ones, those it had when it was swapped out,
    or the prompt of its family.

    None: it must wait until the family's first member has computed the prompt.
    """
    if request.num_swapped_tokens:
        return _find_swapped(manager, request)
    family, checkpoints = request.family, manager.checkpoints
    is_shareable = checkpoints is None or checkpoints.is_shareable(request)
    if family is not None and not request.num_output_tokens and is_shareable:
        start = _find_prompt(manager, request, family)
        if start is not None or family.waits_for_prompt(request):
            return start
    if checkpoints is not None:
        return _find_checkpoint(manager, checkpoints, request)
    found = manager.find_kept(request)
    num_tokens = len(found.blocks[0]) * manager.block_size
    return StartPoint(num_tokens, found.blocks, missing=found.missing)


def _find_swapped(manager: KVCacheManager, request: Request) -> StartPoint:
    """Its tokens in host memory count as computed; of those that are cached, nothing is copied. If
    the model keeps states, it starts where its own state is.
    """
    if manager.checkpoints is not None:
        most = request.num_swapped_tokens // manager.block_size
        return StartPoint(request.num_swapped_tokens, manager.get_computed_blocks(request, most))
    blocks = manager.get_computed_blocks(request)
    num_cached = len(blocks[0]) * manager.block_size
    return StartPoint(max(num_cached, request.num_swapped_tokens), blocks)


def _find_checkpoint(
    manager: KVCacheManager, checkpoints: StateCheckpoints, request: Request
) -> StartPoint:
    """The deepest checkpoint, in its place or to be loaded, whose blocks the cache has or can
    load.
    """
    found = manager.find_kept(request)
    num_shared = len(found.blocks[0]) * manager.block_size
    while num_blocks := len(found.blocks[0]):
        checkpoint = checkpoints.find(request.block_hashes[:num_blocks])
        most = 0 if checkpoint is None else checkpoint.num_tokens // manager.block_size
        loaded_state, deepest = None, manager.count_to_state(request, num_blocks)
        if deepest > most:
            most, checkpoint = deepest, None
            loaded_state = request.block_hashes[deepest - 1]
        if most == num_blocks:
            return StartPoint(
                num_blocks * manager.block_size,
                found.blocks,
                missing=found.missing,
                checkpoint=checkpoint,
                loaded_state=loaded_state,
                num_shared=num_shared,
            )
        found = manager.find_kept(request, most)
    return StartPoint(0, manager.no_blocks(), num_shared=num_shared)


def _find_prompt(manager: KVCacheManager, request: Request, family: Family) -> StartPoint | None:
    """What the members have in common (KVCacheManager.num_shareable).

    None if no member has it, or if a window has left it.
    """
    num_tokens = manager.num_shareable(request)
    blocks = checkpoint = None
    if manager.checkpoints is not None:
        checkpoint = manager.checkpoints.shared_by(family)
        if checkpoint is None:
            return None
    if family.parked is not None and manager.holds_parked(family.parked):
        blocks = family.parked.blocks
    elif (source := family.find_source()) is not None:
        blocks = manager.get_blocks(source, num_tokens)
    if blocks is None:
        return None
    if num_tokens % manager.block_size == 0:  # always, at a checkpoint
        return StartPoint(num_tokens, blocks, is_fork=True, checkpoint=checkpoint)
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
