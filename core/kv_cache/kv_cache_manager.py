"""Allocates KV-cache blocks to requests, and finds cached blocks of a prompt's beginning.

Must not know: who is scheduled when, the memory behind a block, torch.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from concurrent.futures import Future
from hashlib import sha256
from itertools import islice
from typing import Any, NamedTuple

from ...ipc.block_offload import Beginning, name_in_group
from ...ipc.models.kv_layout import KVLayout
from ..request import Request
from .block_pool import BlockPool, Blocks, KVCacheBlock, ParkedBlocks
from .events import KEY_BYTES, KVEvents
from .offload import OffloadedBlocks
from .state_checkpoints import StateCheckpoints

NOT_KEPT = -1  # in a table of host blocks


def key_of(block_hash: bytes, group: int) -> bytes:
    """The name under which the pool finds a group's block with this content."""
    return block_hash + group.to_bytes(2) if group else block_hash


class FoundBlocks(NamedTuple):
    """What there is of a request's beginning."""

    blocks: Blocks  # null where no later token sees a block, or where one is to be loaded
    missing: Sequence[
        tuple[int, int]
    ] = ()  # (index, group) of blocks that are to be loaded, in order


class WatchedBlockPool(BlockPool):
    """Reports what it forgets, to those who publish events and to the place where evicted blocks
    go. KVCacheManager, which knows the tokens, reports what it caches.
    """

    def __init__(self, num_blocks: int, events: KVEvents | None, offload: OffloadedBlocks | None):
        super().__init__(num_blocks)
        self._events, self._offload = events, offload

    def _take(self) -> KVCacheBlock:
        block = super()._take()
        if self._offload is not None:
            self._offload.evict(block)
        return block

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        released = list(blocks)
        super().free_blocks(released)
        if self._offload is not None:
            self._offload.note_released(released)

    def uncache(self, block: KVCacheBlock) -> None:
        name = block.block_hash
        super().uncache(block)
        if name is not None:
            if self._offload is not None:
                self._offload.note_forgotten(name)
            if self._events is not None:
                self._events.removed(name)

    def reset_prefix_cache(self) -> bool:
        was_reset = super().reset_prefix_cache()
        # what is elsewhere can still be found
        if was_reset and self._events is not None and self._offload is None:
            self._events.cleared()
        return was_reset


class KVCacheManager:
    """Owns the block tables, one for each group of layers (ipc/models/kv_layout.py).

    A table only grows: while a request runs, its position i is in entry i // block_size. In a group
    with a window, entries that the window has left become the null block, which is never read.
    """

    def __init__(
        self,
        num_blocks: int,
        layout: KVLayout,
        enable_caching: bool = True,
        num_host_blocks: int = 0,
        max_spare_tokens: int = 0,
        events: KVEvents | None = None,
        offload: OffloadedBlocks | None = None,
        checkpoints: StateCheckpoints | None = None,
    ):
        """max_spare_tokens: tokens for which a request may keep room that no step has used.
        events: receives what the prefix cache learns and forgets. offload: takes evicted blocks.
        checkpoints: of a model that keeps states, which the caller copies as a request begins.
        """
        self.max_spare_tokens = max_spare_tokens
        self.layout = layout
        self.block_size = layout.block_size
        self.num_host_blocks = num_host_blocks
        self.enable_caching = enable_caching
        self.events, self.offload, self.checkpoints = events, offload, checkpoints
        self.block_pool = BlockPool(num_blocks)
        if events is not None or offload is not None:
            self.block_pool = WatchedBlockPool(num_blocks, events, offload)
        self._tables: dict[str, Blocks] = {}
        # host blocks of swapped requests; NOT_KEPT where the table has the null block
        self._host_tables: dict[str, list[list[int]]] = {}
        self._free_host_blocks = array("q", range(num_host_blocks - 1, -1, -1))  # may be long
        # entries of the tables that were offered to the cache; absent: none
        self._num_cached: dict[str, int] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.block_pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Fraction of the blocks that requests hold, from 0 to 1."""
        return self.block_pool.num_used_blocks / (self.block_pool.num_blocks - 1)

    def get_block_ids(self, request_id: str) -> list[int]:
        """The blocks that a request holds, group by group."""
        return [block.block_id for block in self._kept(self._tables.get(request_id, ()))]

    def num_blocks_of(self, request_id: str) -> int:
        return len(self._kept(self._tables.get(request_id, ())))

    def _kept(self, blocks: Sequence[Sequence[KVCacheBlock]]) -> list[KVCacheBlock]:
        null = self.block_pool.null_block
        return [block for row in blocks for block in row if block is not null]

    def no_blocks(self) -> Blocks:
        return [[] for _ in self.layout.windows]

    def get_computed_blocks(self, request: Request, most: int = sys.maxsize) -> Blocks:
        """The longest beginning of the request's tokens, of at most `most` blocks, of which the
        cache has what the next token sees: in groups with a window, the last blocks.

        At least one token remains to compute, since its logits are needed. A prompt that is cached
        to its end recomputes its last block.
        """
        return self.find_kept(request, most, loads=False).blocks

    def find_kept(
        self, request: Request, most: int = sys.maxsize, *, loads: bool = True
    ) -> FoundBlocks:
        """As get_computed_blocks; if `loads`, also what can be loaded for a waiting request."""
        most = min(most, (request.num_tokens - 1) // self.block_size)
        if not (most and self.enable_caching and request.reads_prefix_cache):
            return FoundBlocks(self.no_blocks())
        kept = self.offload.blocks_for(request) if loads and self.offload is not None else ()
        return self._search(request.extend_block_hashes(self.block_size), most, kept)

    def _search(self, hashes: list[bytes], most: int, kept: Container[bytes]) -> FoundBlocks:
        """The longest beginning, of at most `most` blocks, of what the cache has or `kept` names
        (name_in_group).
        """
        null, cached = self.block_pool.null_block, self.block_pool.get_cached_block

        def is_missing(group: int, index: int) -> bool:
            digest = hashes[index]
            if cached(key_of(digest, group)) is not None:
                return False
            return name_in_group(digest, group) not in kept

        windows = self.layout.windows
        num_blocks = self.layout.longest_kept(most, is_missing)
        blocks: Blocks = []
        missing: list[tuple[int, int]] = []
        for group, window in enumerate(windows):
            first = self.layout.first_seen(window, num_blocks * self.block_size)
            row = [cached(key_of(digest, group)) for digest in hashes[first:num_blocks]]
            missing += [(i, group) for i, block in enumerate(row, start=first) if block is None]
            blocks.append([null] * first + [block or null for block in row])
        return FoundBlocks(blocks, tuple(sorted(missing)))

    def count_to_state(self, request: Request, num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks of a waiting request there are up to the last
        one at whose end a state can be loaded.
        """
        if self.offload is None or not request.reads_prefix_cache:
            return 0
        return self.offload.count_to_state(request, request.block_hashes[:num_blocks])

    def load(self, request: Request, missing: Sequence[tuple[int, int]]) -> bool:
        """Loads blocks (index, group) of a request that has begun. Returns False if not all of them
        could be loaded; the request has not begun then.
        """
        assert self.offload is not None
        tables, hashes = self._tables[request.request_id], request.block_hashes
        blocks = [tables[group][index] for index, group in missing]
        names = [name_in_group(hashes[index], group) for index, group in missing]
        if self.offload.load(blocks, names):
            return True
        self.free(request)
        return False

    def fetch(self, request: Request) -> Future[None] | None:
        """Has other engines send what they have computed of the beginning of a request that has
        not arrived yet; see BlockOffload.fetch.
        """
        most = (request.num_tokens - 1) // self.block_size
        is_of_use = most and self.enable_caching and request.reads_prefix_cache
        if not is_of_use or self.offload is None:
            return None
        hashes = request.extend_block_hashes(self.block_size)[:most]
        cached, groups = self.block_pool.get_cached_block, range(len(self.layout.windows))
        cached_names = {
            name_in_group(digest, group)
            for group in groups
            for digest in hashes
            if cached(key_of(digest, group)) is not None
        }
        before = None if self.checkpoints is None else self.checkpoints.find(hashes)
        num_to_state = 0 if before is None else before.num_tokens // self.block_size
        return self.offload.fetch(Beginning(self.layout, hashes, cached_names, num_to_state))

    def begin(
        self, request: Request, num_new_tokens: int, blocks: Blocks, num_computed: int
    ) -> list[int] | None:
        """Makes the tables of a request that starts, with room for `num_new_tokens` after the
        `num_computed` computed ones; returns their block ids, group by group, or None (and no
        change) if the cache is full.

        `blocks` hold the beginning of the computed tokens (get_computed_blocks, get_blocks). Where
        they have the null block in place of one that the next token sees (find_kept), the table
        gets another block.
        """
        tables = self._begin_tables(blocks, num_computed) if num_computed else self.no_blocks()
        num_blocks = -(-(num_computed + num_new_tokens) // self.block_size)
        gaps = self._gaps(tables, num_computed) if num_computed else []
        num_missing = [num_blocks - len(table) for table in tables]
        num_new = sum(num_missing) + len(gaps)
        if self.num_free_after(num_new, tables) < 0:
            return None
        if num_computed:
            self._hold(request, tables, len(blocks[0]) * self.block_size, num_computed)
        new = iter(self.block_pool.get_new_blocks(num_new))
        if gaps:
            self._num_cached[request.request_id] = gaps[0][0]
            for index, group in gaps:
                tables[group][index] = next(new)
        for table, count in zip(tables, num_missing):
            table.extend(islice(new, count))
        self._tables[request.request_id] = tables
        return [block.block_id for table in tables for block in table]

    def _begin_tables(self, blocks: Blocks, num_computed: int) -> Blocks:
        """The tables of the computed tokens. `blocks` hold the beginning of these; blocks that no
        later token sees become the null block.
        """
        null = self.block_pool.null_block
        num_given = len(blocks[0])
        tables: Blocks = []
        for window, row in zip(self.layout.windows, blocks):
            first = self.layout.first_seen(window, num_computed)
            num_null = min(first, num_given)
            tables.append([null] * num_null + row[num_null:] + [null] * (first - num_given))
        return tables

    def _gaps(self, tables: Blocks, num_computed: int) -> list[tuple[int, int]]:
        """(index, group) of the null blocks that a later token sees, in order."""
        gaps: list[tuple[int, int]] = []
        null = self.block_pool.null_block
        for group, (window, table) in enumerate(zip(self.layout.windows, tables)):
            first = self.layout.first_seen(window, num_computed)
            if null in (seen := table[first:]):
                gaps += [(i, group) for i, block in enumerate(seen, first) if block is null]
        return sorted(gaps)

    def _hold(self, request: Request, tables: Blocks, num_given: int, num_computed: int) -> None:
        """The request holds the blocks in its tables. `num_given`: the tokens that fit in them."""
        self.block_pool.touch(self._kept(tables))
        num_blocks = num_given // self.block_size
        if num_computed < num_given:
            self._take_over(request, tables, num_blocks - 1)
        if num_blocks:
            self._num_cached[request.request_id] = min(num_blocks, num_computed // self.block_size)

    def _take_over(self, request: Request, tables: Blocks, index: int) -> None:
        """The request writes into these blocks, and no other one holds them. What they held after
        its own tokens cannot be found any more; names of parked blocks mean its tokens alone.
        """
        own = request.extend_block_hashes(self.block_size)[index : index + 1]
        for group, table in enumerate(tables):
            name = table[index].block_hash
            if name is None or len(name) > KEY_BYTES or (own and name == key_of(own[0], group)):
                continue
            self.block_pool.uncache(table[index])

    def allocate_slots(self, request: Request, num_new_tokens: int) -> list[int] | None:
        """Makes room for `num_new_tokens` after the computed ones of a running request; returns the
        block ids added to its tables, equally many of each group in turn, or None (and no change)
        if the cache is full.
        """
        tables = self._tables[request.request_id]
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_new = -(-num_tokens // self.block_size) - len(tables[0])
        if num_new <= 0:
            return []
        num_wanted = num_new * len(tables)
        if self.layout.has_windows:
            self._release_unseen(request, tables, num_wanted)
        if num_wanted > self.block_pool.num_free_blocks:
            return None
        blocks = self.block_pool.get_new_blocks(num_wanted)
        for group, table in enumerate(tables):
            table.extend(blocks[group * num_new : (group + 1) * num_new])
        return [block.block_id for block in blocks]

    def _release_unseen(self, request: Request, tables: Blocks, num_wanted: int) -> None:
        """Releases what no later token sees. Cached blocks stay findable.

        What a sibling that has not started needs of the prompt is kept while `num_wanted` blocks
        are free without it. Blocks that a step in flight reads are not released, since they are not
        offered to the cache yet.
        """
        num_executed = request.num_executed_tokens
        if request.family is not None and request.family.has_unstarted:
            self._release_before(tables, min(num_executed, self.num_shareable(request)))
            if num_wanted <= self.block_pool.num_free_blocks:
                return
        self._release_before(tables, num_executed)

    def _release_before(self, tables: Blocks, num_tokens: int) -> None:
        null = self.block_pool.null_block
        for window, table in zip(self.layout.windows, tables):
            first = end = min(self.layout.first_seen(window, num_tokens), len(table))
            while first and table[first - 1] is not null:
                first -= 1
            if first < end:
                self.block_pool.free_blocks(reversed(table[first:end]))
                table[first:end] = [null] * (end - first)

    def num_free_after(self, num_new_blocks: int, blocks: Blocks) -> int:
        """Blocks left free if `blocks` were held and this many others allocated; negative: they do
        not fit.
        """
        # A hit on a free block takes it out of the free list, too.
        num_free_hits = sum(block.ref_cnt == 0 for block in self._kept(blocks))
        return self.block_pool.num_free_blocks - num_new_blocks - num_free_hits

    def num_needed(self, num_tokens: int, blocks: Blocks) -> int:
        """Blocks that a request needs at a time, beside `blocks`, until it has `num_tokens`."""
        return max(0, self.layout.most_blocks(num_tokens) - len(self._kept(blocks)))

    def num_shareable(self, request: Request) -> int:
        """After how many tokens of the prompt the other completions of it may start: all but the
        last, whose logits each needs for its own sample. States are not there after every token; 0:
        each computes the prompt.
        """
        if self.checkpoints is None:
            return request.num_prompt_tokens - 1
        assert request.family is not None
        checkpoint = self.checkpoints.shared_by(request.family)
        return 0 if checkpoint is None else checkpoint.num_tokens

    def get_blocks(self, request: Request, num_tokens: int) -> Blocks | None:
        """The blocks with the first tokens of a running request, for another one to share.

        None if a window has left blocks that the next token would see.
        """
        tables, null = self._tables[request.request_id], self.block_pool.null_block
        num_blocks, blocks = -(-num_tokens // self.block_size), []
        for window, table in zip(self.layout.windows, tables):
            first = self.layout.first_seen(window, num_tokens)
            blocks.append([null] * first + table[first:num_blocks])
            if null in blocks[-1][first:]:
                return None
        return blocks

    def park(self, request: Request, num_tokens: int) -> ParkedBlocks | None:
        """Makes the blocks with the first tokens of a running request findable for others; None
        where get_blocks returns it.

        Call it before the request ends. Nothing is reserved: the blocks are free when no request
        holds them, and evicted like cached ones.
        """
        blocks = self.get_blocks(request, num_tokens)
        if blocks is None:
            return None
        root = sha256(b"parked:" + request.request_id.encode("utf-8", "surrogatepass")).digest()
        names, own_names = [], set()
        for index, block in enumerate(self._kept(blocks)):
            if block.block_hash is None:
                name = root + index.to_bytes(4)  # longer than any content hash
                self.block_pool.cache(block, name)
                own_names.add(name)
            names.append((block, block.block_hash))
        return ParkedBlocks(blocks, names, frozenset(own_names))

    def holds_parked(self, parked: ParkedBlocks) -> bool:
        """Whether none of the blocks was reallocated."""
        return all(block.block_hash == name for block, name in parked.names)

    def unpark(self, parked: ParkedBlocks) -> None:
        """These blocks are no longer needed by others."""
        for block, name in parked.names:
            if name in parked.own_names and block.block_hash == name:
                self.block_pool.uncache(block)

    # ------------------------------------------------------------ host memory

    @property
    def num_swapped_requests(self) -> int:
        return len(self._host_tables)

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        """Frees the request's blocks and allocates a host block for each; returns the copies to
        make, (device, host). None if the host is full.
        """
        null = self.block_pool.null_block
        num_used = -(-request.num_computed_tokens // self.block_size)
        # without the room of drafts that were not accepted
        tables = [table[:num_used] for table in self._tables[request.request_id]]
        if len(self._kept(tables)) > len(self._free_host_blocks):
            return None
        host_tables = [
            [NOT_KEPT if block is null else self._free_host_blocks.pop() for block in table]
            for table in tables
        ]
        self._host_tables[request.request_id] = host_tables
        pairs = [
            (block.block_id, host_block)
            for table, host_table in zip(tables, host_tables)
            for block, host_block in zip(table, host_table)
            if block is not null
        ]
        self.free(request)
        return pairs

    def swap_in(self, request: Request, num_computed_blocks: int) -> list[tuple[int, int]]:
        """The copies, (host, device), that fill the request's tables after the blocks found in the
        cache.

        Its host blocks are free from now on: their content is read before anything overwrites it (a
        step swaps out or admits, never both).
        """
        host_tables, null = self._host_tables[request.request_id], self.block_pool.null_block
        pairs = [
            (host_table[i], table[i].block_id)
            for table, host_table in zip(self._tables[request.request_id], host_tables)
            for i in range(num_computed_blocks, len(host_table))
            if table[i] is not null
        ]
        self.free_host_blocks(request)
        return pairs

    def trim_host_blocks(self, request: Request, num_tokens: int) -> None:
        """Frees the host blocks of a request after its first `num_tokens` tokens."""
        num_used = -(-num_tokens // self.block_size)
        for table in self._host_tables[request.request_id]:
            freed = [block for block in table[num_used:] if block != NOT_KEPT]
            self._free_host_blocks.extend(reversed(freed))
            del table[num_used:]

    def free_host_blocks(self, request: Request) -> list[int]:
        """Frees the request's host blocks and returns them."""
        host_tables = self._host_tables.pop(request.request_id, [])
        host_blocks = [block for table in host_tables for block in table if block != NOT_KEPT]
        self._free_host_blocks.extend(reversed(host_blocks))
        return host_blocks

    # ------------------------------------------------------------ the prefix cache

    def note_executed(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens of the request are computed, and their step has run."""
        if num_tokens // self.block_size > request.num_executed_tokens // self.block_size:
            self.cache_blocks(request, num_tokens)
        request.num_executed_tokens = num_tokens

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Offers the request's full blocks to the cache, and states at their ends, after their
        tokens were computed (not when they are scheduled).
        """
        if self.checkpoints is not None:
            self.checkpoints.note_executed(request, num_computed_tokens)
        num_full_blocks = num_computed_tokens // self.block_size
        num_cached = self._num_cached.get(request.request_id, 0)
        if not self.enable_caching or num_full_blocks <= num_cached:
            return
        hashes, null = request.extend_block_hashes(self.block_size), self.block_pool.null_block
        cache, events, offload = self.block_pool.cache, self.events, self.offload
        for group, table in enumerate(self._tables[request.request_id]):
            for index in range(num_cached, num_full_blocks):
                if table[index] is not null:
                    key = key_of(hashes[index], group)
                    is_new = cache(table[index], key)
                    if is_new and events is not None:
                        events.stored(request, group, index)
                    if is_new and offload is not None:
                        offload.note_cached(request, key, table[index])
        self._num_cached[request.request_id] = num_full_blocks

    def free(self, request: Request) -> None:
        """Releases the request's tables, tail first.

        Cached blocks stay findable until their space is needed.
        """
        if self.checkpoints is not None:
            self.checkpoints.end(request)
        self._num_cached.pop(request.request_id, None)
        tables = self._tables.pop(request.request_id, ())
        blocks = self._kept([*zip(*tables)])  # of all groups, position by position
        self.block_pool.free_blocks(reversed(blocks))

    def discard(self, request: Request) -> None:
        """Releases the tables of a failed request. Its blocks are not trusted, so they lose their
        hashes.
        """
        for block in self._kept(self._tables.get(request.request_id, ())):
            self.block_pool.uncache(block)
        if self.offload is not None:
            groups = range(len(self.layout.windows))
            hashes = request.block_hashes
            self.offload.forget([name_in_group(one, group) for group in groups for one in hashes])
        if self.checkpoints is not None:
            self.checkpoints.discard(request)
        self.free(request)

    def reset_prefix_cache(self) -> bool:
        """Drops what can be found, if no request holds a block; returns whether it did."""
        was_reset = self.block_pool.reset_prefix_cache()
        if was_reset and self.checkpoints is not None:
            self.checkpoints.clear()
        return was_reset

    def check_integrity(self, running: Sequence[Request], swapped: Sequence[Request] = ()) -> None:
        """Raises AssertionError unless running requests have tables that cover their tokens, a
        block counts the tables it is in, and swapped requests have host blocks.
        """
        self.block_pool.check_integrity()
        if self.checkpoints is not None:
            self.checkpoints.check_integrity(running, swapped)
        null = self.block_pool.null_block
        if sorted(self._tables) != sorted(request.request_id for request in running):
            raise AssertionError(f"tables of {list(self._tables)}, but {running} run")
        held = Counter(
            block.block_id for tables in self._tables.values() for block in self._kept(tables)
        )
        miscounted = {
            block: held[block.block_id]
            for block in self.block_pool.blocks
            if block.ref_cnt != held.get(block.block_id, 0)
        }
        if miscounted:
            raise AssertionError(f"blocks and the number of tables they are in: {miscounted}")
        for request in running:
            num_used = -(-request.num_computed_tokens // self.block_size)
            tables = self._tables[request.request_id]
            num_spare = len(tables[0]) - num_used
            most = request.num_computed_tokens + self.max_spare_tokens
            if num_spare > 0 and len(tables[0]) <= -(-most // self.block_size):
                tables = [table[:num_used] for table in tables]
            self._check_tables(request, request.num_computed_tokens, tables, null)
        if not self._num_cached.keys() <= self._tables.keys():
            raise AssertionError("cache marks of requests that hold nothing")
        if sorted(self._host_tables) != sorted(request.request_id for request in swapped):
            raise AssertionError(f"host blocks of {list(self._host_tables)}, swapped: {swapped}")
        for request in swapped:
            self._check_tables(
                request,
                request.num_swapped_tokens,
                self._host_tables[request.request_id],
                NOT_KEPT,
            )
        on_host = sorted(
            [
                *self._free_host_blocks,
                *(
                    block
                    for tables in self._host_tables.values()
                    for table in tables
                    for block in table
                    if block != NOT_KEPT
                ),
            ]
        )
        if on_host != list(range(self.num_host_blocks)):
            raise AssertionError(f"host blocks are lost, or held twice: {on_host}")

    def _check_tables(
        self, request: Request, num_tokens: int, tables: Sequence[list[Any]], missing: Any
    ) -> None:
        """Every table covers the tokens, and has what the next token sees. `missing`: the entry
        that stands for a released block.
        """
        num_blocks = -(-num_tokens // self.block_size)
        for window, table in zip(self.layout.windows, tables, strict=True):
            if len(table) != num_blocks:
                raise AssertionError(f"{request} has a table of {len(table)} blocks")
            first = next((i for i, block in enumerate(table) if block != missing), num_blocks)
            if first > self.layout.first_seen(window, num_tokens) or missing in table[first:]:
                raise AssertionError(f"{request} lacks blocks that it sees: {table}")
