"""A subscriber to events of the KV cache, as a router is one. It loses messages, and asks for what
it has missed.
"""

from __future__ import annotations

import random
import time

import zmq
from quire.core.request import hash_block, hash_root
from quire.ipc.kv_events import (
    END_OF_REPLAY,
    GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    decode_batch,
    hash_for_routers,
)

DEADLINE_S = 20.0
ANSWER_S = 2.0  # then a subscriber asks again: a question to an engine that has ended is lost
Known = tuple[str | None, int | None, int]  # medium, group of layers, hash


class Subscriber:
    """Knows which blocks are cached, from messages alone.

    `loss`: the part of live messages that never arrive.
    """

    def __init__(self, endpoint: str, replay_endpoint: str, loss: float = 0.0, seed: int = 0):
        self.known: set[Known] = set()
        self.last = -1  # the highest number that was applied
        self.num_lost = self.num_replayed = self.num_cleared = self.num_orphans = (
            self.num_checked
        ) = 0
        self._loss, self._rng = loss, random.Random(seed)
        self._context = zmq.Context(io_threads=1)
        self._live = self._context.socket(zmq.SUB)
        self._live.connect(endpoint)
        self._live.subscribe(b"")
        self._replay_endpoint = replay_endpoint
        self._connect_replay()
        self._full: dict[int, bytes] = {}  # the whole hash of each one that was stored

    def close(self) -> None:
        self._context.destroy(linger=0)

    def read(self) -> None:
        """Apply what has arrived."""
        while self._live.poll(0):
            topic, number, payload = self._live.recv_multipart()
            assert topic == b"" and len(number) == 8
            if self._rng.random() < self._loss:
                self.num_lost += 1
                continue
            number = int.from_bytes(number, "big")
            if number > self.last + 1:
                self.catch_up()
            if number == self.last + 1 or not self.last + 1:
                self._apply(number, payload)

    def _connect_replay(self) -> None:
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(self._replay_endpoint)

    def catch_up(self) -> None:
        """Ask for everything after the last number."""
        end = time.monotonic() + DEADLINE_S
        while not self._is_answered():
            assert time.monotonic() < end, "no answer"
            self._replay.close(0)  # an answer that comes later is not read
            self._connect_replay()

    def _is_answered(self) -> bool:
        """Ask once, and read the answer."""
        self._replay.send_multipart((b"", (self.last + 1).to_bytes(8, "big")))
        while self._replay.poll(1000 * ANSWER_S):
            empty, number, payload = self._replay.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                assert payload == b""
                return True
            self.num_replayed += 1
            self._apply(int.from_bytes(number, "big"), payload)
        return False

    def read_until(self, number: int) -> None:
        """Read and catch up until this number has been applied."""
        end = time.monotonic() + DEADLINE_S
        while self.last < number:
            assert time.monotonic() < end, f"{self.last} of {number}"
            self.read()
            if self.last < number:
                self.catch_up()

    def _apply(self, number: int, payload: bytes) -> None:
        assert number > self.last
        self.last = number
        for event in decode_batch(payload).events:
            if isinstance(event, BlockStored):
                added = {(event.medium, event.group_idx, one) for one in event.block_hashes}
                assert len(added) == len(event.block_hashes) and not added & self.known
                self.known |= added
                if event.medium == GPU:
                    self._check_hashes(event)
            elif isinstance(event, BlockRemoved):
                removed = {(event.medium, event.group_idx, one) for one in event.block_hashes}
                assert removed <= self.known
                self.known -= removed
            elif isinstance(event, AllBlocksCleared):
                self.num_cleared += 1
                self.known.clear()

    def _check_hashes(self, event: BlockStored) -> None:
        """A block's hash follows from its parent, its tokens and the salt."""
        assert len(event.token_ids) == event.block_size * len(event.block_hashes)
        keys = event.extra_keys or [None] * len(event.block_hashes)
        assert len(keys) == len(event.block_hashes)
        if event.parent_block_hash is None:
            parent = hash_root(None if keys[0] is None else keys[0][-1])
        elif event.parent_block_hash in self._full:
            parent = self._full[event.parent_block_hash]
        else:
            # a block that is kept for siblings has a name of its own; a window may leave a block
            # before it is stored
            self.num_orphans += event.kv_cache_spec_kind != "sliding_window"
            return
        for index, short in enumerate(event.block_hashes):
            first = index * event.block_size
            parent = hash_block(parent, event.token_ids[first : first + event.block_size])
            assert hash_for_routers(parent) == short
            self._full[short] = parent
            self.num_checked += 1
