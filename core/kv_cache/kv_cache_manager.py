"""Allocates KV-cache blocks to requests, and finds cached blocks of a prompt's beginning.

Must not know: who is scheduled when, the memory behind a block, torch.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple

from ..request import Request
from .block_pool import BlockPool, KVCacheBlock


class ParkedBlocks(NamedTuple):
    """Blocks that an ended request left for others. A reallocated block has lost its name."""

    blocks: list[KVCacheBlock]
    names: list[bytes]  # a block's hash, or a name of its own if it has none
    own_names: frozenset[bytes]  # given by `park`


class KVCacheManager:
    """Owns the block tables.

    A table only grows: while a request runs, its position i is in entry i // block_size.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_caching: bool = True,
        num_host_blocks: int = 0,
    ):
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self.enable_caching = enable_caching
        self.block_pool = BlockPool(num_blocks)
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._host_tables: dict[str, list[int]] = {}  # host blocks of swapped requests
        self._free_host_blocks = array("q", range(num_host_blocks - 1, -1, -1))  # may be long
        # entries of the table that were offered to the cache; absent: none
        self._num_cached: dict[str, int] = {}
        self.prefix_cache_queries = 0  # tokens
        self.prefix_cache_hits = 0  # tokens

    @property
    def num_free_blocks(self) -> int:
        return self.block_pool.num_free_blocks

    @property
    def usage(self) -> float:
        """Fraction of the blocks that requests hold, from 0 to 1."""
        return self.block_pool.num_used_blocks / (self.block_pool.num_blocks - 1)

    def get_block_ids(self, request_id: str) -> list[int]:
        return [block.block_id for block in self._tables.get(request_id, ())]

    def num_blocks_of(self, request_id: str) -> int:
        return len(self._tables.get(request_id, ()))

    def get_computed_blocks(self, request: Request) -> list[KVCacheBlock]:
        """The longest run of cached blocks at the beginning of the request's tokens. Changes
        nothing.

        At least one token remains to compute, since its logits are needed. A prompt that is cached
        to its end recomputes its last block.
        """
        if not self.enable_caching or not request.reads_prefix_cache:
            return []
        blocks: list[KVCacheBlock] = []
        max_blocks = (request.num_tokens - 1) // self.block_size
        for block_hash in request.extend_block_hashes(self.block_size)[:max_blocks]:
            block = self.block_pool.get_cached_block(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate_slots(
        self, request: Request, num_new_tokens: int, computed_blocks: Sequence[KVCacheBlock] = ()
    ) -> list[int] | None:
        """Makes room for `num_new_tokens` after the computed ones; returns the block ids added
        to the
        table, or None (and no change) if the cache is full.

        `computed_blocks` come from get_computed_blocks, at admission, when the request holds
        nothing; they start its table.
        """
        table = self._tables.get(request.request_id, ())
        num_tokens = request.num_computed_tokens + num_new_tokens
        if table and num_tokens <= len(table) * self.block_size:
            return []
        num_new_blocks = -(-num_tokens // self.block_size) - len(table)
        # A hit on a free block takes it out of the free list, too.
        num_free_hits = sum(block.ref_cnt == 0 for block in computed_blocks)
        if num_new_blocks + num_free_hits > self.block_pool.num_free_blocks:
            return None
        self.block_pool.touch(computed_blocks)
        gained = [*computed_blocks, *self.block_pool.get_new_blocks(num_new_blocks)]
        self._tables.setdefault(request.request_id, []).extend(gained)
        if computed_blocks:
            self._num_cached[request.request_id] = len(computed_blocks)
        return [block.block_id for block in gained]

    def num_free_after(self, num_new_blocks: int, computed_blocks: Sequence[KVCacheBlock]) -> int:
        """Blocks left free if `computed_blocks` were held and this many others allocated; negative:
        they do not fit.
        """
        return (
            self.block_pool.num_free_blocks
            - num_new_blocks
            - sum(block.ref_cnt == 0 for block in computed_blocks)
        )

    def get_blocks(self, request: Request, num_blocks: int) -> list[KVCacheBlock]:
        """The first blocks of a running request, for another one to share."""
        return self._tables[request.request_id][:num_blocks]

    def park(self, request: Request, num_blocks: int) -> ParkedBlocks:
        """Makes the first blocks of a running request findable for others.

        Call it before the request ends. Nothing is reserved: the blocks are free when no request
        holds them, and evicted like cached ones.
        """
        blocks, names, own_names = self.get_blocks(request, num_blocks), [], set()
        root = sha256(b"parked:" + request.request_id.encode("utf-8", "surrogatepass")).digest()
        for index, block in enumerate(blocks):
            if block.block_hash is None:
                name = root + index.to_bytes(4)  # longer than any content hash
                self.block_pool.cache(block, name)
                own_names.add(name)
            names.append(block.block_hash)
        return ParkedBlocks(blocks, names, frozenset(own_names))

    def holds_parked(self, parked: ParkedBlocks) -> bool:
        """Whether none of the blocks was reallocated."""
        return all(
            block.block_hash == name
            for block, name in zip(parked.blocks, parked.names, strict=True)
        )

    def unpark(self, parked: ParkedBlocks) -> None:
        """These blocks are no longer needed by others."""
        for block, name in zip(parked.blocks, parked.names, strict=True):
            if name in parked.own_names and block.block_hash == name:
                self.block_pool.uncache(block)

    # ------------------------------------------------------------ host memory

    @property
    def num_swapped_requests(self) -> int:
        return len(self._host_tables)

    @property
    def num_free_host_blocks(self) -> int:
        return len(self._free_host_blocks)

    def swap_out(self, request: Request) -> list[tuple[int, int]] | None:
        """Frees the request's blocks and allocates a host block for each; returns the copies to
        make,
        (device, host). None if the host is full.
        """
        table = self._tables[request.request_id]
        if len(table) > len(self._free_host_blocks):
            return None
        host_blocks = [self._free_host_blocks.pop() for _ in table]
        self._host_tables[request.request_id] = host_blocks
        pairs = [(block.block_id, host_block) for block, host_block in zip(table, host_blocks)]
        self.free(request)
        return pairs

    def swap_in(self, request: Request, num_computed_blocks: int) -> list[tuple[int, int]]:
        """The copies, (host, device), that fill the request's table after the blocks found in the
        cache.

        Its host blocks are free from now on: their content is read before anything overwrites it (a
        step swaps out or admits, never both).
        """
        table, host_blocks = self._tables[request.request_id], self._host_tables[request.request_id]
        pairs = [
            (host_blocks[i], table[i].block_id)
            for i in range(num_computed_blocks, len(host_blocks))
        ]
        self.free_host_blocks(request)
        return pairs

    def free_host_blocks(self, request: Request) -> list[int]:
        """Frees the request's host blocks and returns them."""
        host_blocks = self._host_tables.pop(request.request_id, [])
        self._free_host_blocks.extend(reversed(host_blocks))
        return host_blocks

    # ------------------------------------------------------------ the prefix cache

    def record_prefix_query(self, num_query_tokens: int, num_hit_tokens: int) -> None:
        self.prefix_cache_queries += num_query_tokens
        self.prefix_cache_hits += num_hit_tokens

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Offers the request's full blocks to the cache, after their tokens were computed (not when
        they are scheduled).
        """
        num_full_blocks = num_computed_tokens // self.block_size
        num_cached = self._num_cached.get(request.request_id, 0)
        if not self.enable_caching or num_full_blocks <= num_cached:
            return
        table, hashes = (
            self._tables[request.request_id],
            request.extend_block_hashes(self.block_size),
        )
        for index in range(num_cached, num_full_blocks):
            self.block_pool.cache(table[index], hashes[index])
        self._num_cached[request.request_id] = num_full_blocks

    def free(self, request: Request) -> None:
        """Releases the request's table, tail first.

        Cached blocks stay findable until their space is needed.
        """
        self._num_cached.pop(request.request_id, None)
        self.block_pool.free_blocks(reversed(self._tables.pop(request.request_id, [])))

    def discard(self, request: Request) -> None:
        """As `free`, for a failed request: its blocks are not trusted, so they lose their
        hashes.
        """
        for block in self._tables.get(request.request_id, ()):
            self.block_pool.uncache(block)
        self.free(request)

    def reset_prefix_cache(self) -> bool:
        return self.block_pool.reset_prefix_cache()

    def check_integrity(self, running: Sequence[Request], swapped: Sequence[Request] = ()) -> None:
        """Raises AssertionError unless running requests have tables that cover their tokens, a
        block
        counts the tables it is in, and swapped requests have host blocks.
        """
        self.block_pool.check_integrity()
        if sorted(self._tables) != sorted(request.request_id for request in running):
            raise AssertionError(f"tables of {list(self._tables)}, but {running} run")
        held = Counter(block.block_id for table in self._tables.values() for block in table)
        miscounted = {
            block: held[block.block_id]
            for block in self.block_pool.blocks
            if block.ref_cnt != held.get(block.block_id, 0)
        }
        if miscounted:
            raise AssertionError(f"blocks and the number of tables they are in: {miscounted}")
        for request in running:
            if len(self._tables[request.request_id]) != -(
                -request.num_computed_tokens // self.block_size
            ):
                raise AssertionError(
                    f"{request} has a table of {len(self._tables[request.request_id])} blocks"
                )
        if not self._num_cached.keys() <= self._tables.keys():
            raise AssertionError("cache marks of requests that hold nothing")
        needed = {
            request.request_id: -(-request.num_swapped_tokens // self.block_size)
            for request in swapped
        }
        if {request_id: len(table) for request_id, table in self._host_tables.items()} != needed:
            raise AssertionError(
                f"swapped requests need {needed} host blocks, they have {self._host_tables}"
            )
        on_host = sorted(
            [
                *self._free_host_blocks,
                *(block for table in self._host_tables.values() for block in table),
            ]
        )
        if on_host != list(range(self.num_host_blocks)):
            raise AssertionError(f"host blocks are lost, or held twice: {on_host}")
