"""Where a waiting request would begin, and whether there is room for it to do so.

Must not know: the queues and their order, slots, the step being made; nothing is taken or changed
here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..kv_cache.block_pool import KVCacheBlock
from ..kv_cache.kv_cache_manager import KVCacheManager
from ..request import Request


class Start(NamedTuple):
    """Where a request that is admitted begins: its first `num_tokens` tokens are computed
    already.
    """

    num_tokens: int
    blocks: list[KVCacheBlock]  # that hold the beginning of them
    source: KVCacheBlock | None = None  # holds the rest of them, for another request: to be copied
    is_fork: bool = False  # they are a sibling's, whatever the prefix cache holds


def find_start(manager: KVCacheManager, request: Request) -> Start | None:
    """The tokens that need not be computed: cached ones, those it had when it was swapped out, or
    the prompt of a sibling. None: it has to wait until its sibling has computed that.
    """
    if request.siblings and not request.num_output_tokens and not request.num_swapped_tokens:
        source = next(
            (r for r in request.siblings if r.num_executed_tokens >= r.num_prompt_tokens), None
        )
        if source is None and request.siblings[0] is not request:
            return None
        if source is not None:
            # All but the last token of the prompt, whose logits everyone needs for a draw of their
            # own.
            num_tokens = request.num_prompt_tokens - 1
            num_blocks, num_more = divmod(num_tokens, manager.block_size)
            blocks = manager.get_blocks(source, num_blocks + 1)
            return Start(
                num_tokens,
                blocks[:num_blocks],
                blocks[num_blocks] if num_more else None,
                is_fork=True,
            )
    blocks = manager.get_computed_blocks(request)
    return Start(max(len(blocks) * manager.block_size, request.num_swapped_tokens), blocks)


def has_room(
    manager: KVCacheManager, running: Iterable[Request], request: Request, start: Start
) -> bool:
    """Whether all tokens of the request, not only this step's, fit beside what the `running` ones
    still need for theirs. Else prompts that are computed in chunks would be admitted together and
    preempt each other half-way. With nobody running it always fits.
    """
    block_size = manager.block_size
    num_reserved = sum(
        -(-other.num_tokens // block_size) - -(-other.num_computed_tokens // block_size)
        for other in running
        if other.num_computed_tokens < other.num_tokens
    )
    num_needed = -(-request.num_tokens // block_size) - len(start.blocks)
    return manager.num_free_after(num_needed + num_reserved, start.blocks) >= 0
