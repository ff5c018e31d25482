"""Sends kept blocks to other engines, and asks others for theirs.

Must not know: torch, what a block holds, requests.

    consumer                                      producer
    Ask(number, identity, names)              ─▶  looks at its store
                                              ◀─  Answer(number, which of them are there)
    Ask(number, identity, names, reads=True)  ─▶  reads its store
                                              ◀─  Answer(number, checksums), a frame per block

Both ends have a thread that works between the network and the store of this engine; no step waits
for them. Blocks arrive in the store, where the engine finds them like those that it has evicted.
The identity is that of a store (kv_offload.py): engines that would compute other bits are refused.
Each rank of an engine exchanges its own share of blocks with the rank that has the same one.

A prompt waits at most as long as the settings say. A peer that sends nothing in that time, or that
is not there, is left alone for a while, so that the next prompts do not wait for it. One that sends
slowly is not: what has arrived is of use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import msgspec
import zmq

from ...ipc.block_offload import Beginning, Transfers, name_in_group
from ...ipc.errors import InvalidParameterError, QuireError
from ...ipc.kv_transfer import OPTION, KVShare, KVTransferConfig
from ...ipc.listener import listener_pid, read_token
from ...ipc.socket_files import directory_lock
from ...ipc.sockets import bind_to_engines, connect_to_engine, has_peer
from .block_store import NAME_BYTES, BlockStore, checksum_of
from .names import ALL, count_to_state, is_block, piece_name

logger = logging.getLogger(__name__)

MOST_NAMES = 65_536  # of one message
BATCH_BYTES = 4 * 2**20  # of blocks in one answer, unless one block is larger
AHEAD = 2  # answers that are asked for before one has come
PAUSE_S = 10.0  # without a peer that has failed
CONNECT_S = 1.0  # most time that a prompt waits for a connection
POLL_S = 0.1  # between two looks at whether the engine ends
BIND_S = 1.0  # between two tries to listen at an address that is in use
MOST_WAITING = 1024  # prompts


class Ask(msgspec.Struct, frozen=True, array_like=True):
    number: int  # of this message, among those of its sender
    identity: bytes  # 32 bytes
    names: list[bytes]
    reads: bool = False
    share: KVShare = KVShare()  # of each block, which the asking rank has


class Answer(msgspec.Struct, frozen=True, array_like=True):
    number: int
    refusal: str = ""  # why this engine's blocks are of no use to the asking one
    has: bytes = b""  # for each name 1 or 0
    checksums: list[int] = []  # of the blocks that follow: the first ones, up to one that is absent


_encode = msgspec.msgpack.encode


# ---------------------------------------------------------------- the producer


class BlockSender:
    """Answers other engines from the store, in a thread."""

    def __init__(
        self,
        config: KVTransferConfig,
        store: Callable[[], BlockStore],
        transfers: Transfers,
        share: KVShare = KVShare(),
    ):
        """config: of this rank. store: it is asked for each message, since it changes with the
        weights.
        """
        self._config, self._store, self._transfers = config, store, transfers
        self._share = share
        self._token = None if config.key_file is None else read_token(config.key_file, "key_file")
        path = Path(config.endpoint.removeprefix("ipc://"))
        self._path = path.absolute() if config.endpoint.startswith("ipc://") else None
        if self._path is not None and path.exists() and not path.is_socket():
            raise InvalidParameterError(OPTION, f"endpoint: {path} exists and is no socket")
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-kv-sender", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with zmq.Context(io_threads=1) as context:
            router = self._bind(context)
            if router is None:
                return
            with router:
                while not self._is_closed.is_set():
                    if router.poll(int(POLL_S * 1000)):
                        try:
                            self._serve(router)
                        except Exception:  # whatever a peer has sent, the others get answers
                            logger.exception("a message about KV blocks was not answered")

    def _bind(self, context: zmq.Context) -> zmq.Socket | None:
        """The socket, once its address is free: an engine that was replaced may still have it."""
        has_warned = False
        while not self._is_closed.is_set():
            try:
                return self._bind_alone(context)
            except (zmq.ZMQError, QuireError, OSError) as error:
                if not has_warned:
                    logger.warning("cannot listen at %s yet: %s", self._config.endpoint, error)
                has_warned = True
                self._is_closed.wait(BIND_S)
        return None

    def _bind_alone(self, context: zmq.Context) -> zmq.Socket:
        """Raises QuireError if a living process has the address."""
        if (path := self._path) is None:
            return bind_to_engines(context, self._config.endpoint, self._token)
        with directory_lock(path.parent):
            if (pid := listener_pid(path)) is not None:  # ZMQ would take the file from it
                raise QuireError(f"the process {pid} listens there")
            return bind_to_engines(context, self._config.endpoint, self._token)

    def _serve(self, router: zmq.Socket) -> None:
        frames = router.recv_multipart(zmq.NOBLOCK)
        try:
            peer, payload = frames
            ask = msgspec.msgpack.decode(payload, type=Ask)
            if len(ask.names) > MOST_NAMES or any(len(one) != NAME_BYTES for one in ask.names):
                raise ValueError("names have 32 bytes")
        except (ValueError, msgspec.MsgspecError) as error:
            logger.warning("a message about KV blocks was dropped: %s", error)
            return
        with contextlib.suppress(zmq.ZMQError):  # it has left
            router.send_multipart([peer, *self._answer(ask)], zmq.NOBLOCK, copy=False)

    def _answer(self, ask: Ask) -> list[bytes | bytearray]:
        store = self._store()
        refusal = ""
        if ask.share != self._share:
            refusal = f"it is {self._share}, and this is {ask.share}"
        elif ask.identity != store.identity:
            refusal = "it has another model, type, block size, kernels or version"
        if refusal:
            logger.warning("an engine is sent no KV blocks: %s", refusal)
            return [_encode(Answer(ask.number, refusal))]
        if not ask.reads:
            kept = store.names()
            has = bytes(name in kept for name in ask.names)
            # they are read next; a beginning is of use without its end
            store.touch([name for name in reversed(ask.names) if is_block(name)])
            return [_encode(Answer(ask.number, has=has))]
        names = ask.names[: blocks_at_once(store)]
        blocks: list[bytearray] = []
        checksums: list[int] = []
        for name in names:  # one by one, since a step that needs the store waits for a read
            block = bytearray(store.block_bytes)
            if not store.read([(name, [memoryview(block)])]):
                break
            blocks.append(block)
            checksums.append(checksum_of(name, [memoryview(block)]))
        store.touch([name for name in names if not is_block(name)])
        self._transfers.num_blocks_sent += len(blocks)
        self._transfers.num_bytes_sent += len(blocks) * store.block_bytes
        return [_encode(Answer(ask.number, checksums=checksums)), *blocks]

    def close(self) -> None:
        """May be called twice."""
        self._is_closed.set()
        self._thread.join()


def blocks_at_once(store: BlockStore) -> int:
    """Blocks of one answer."""
    return max(1, BATCH_BYTES // store.block_bytes)


# ---------------------------------------------------------------- the consumer


class PeerFailure(Exception):
    """A peer cannot be used; the text says why."""


class LateAnswer(PeerFailure):
    """The prompt can wait no longer."""


class Unwanted(Exception):
    """Nobody waits for a prompt's blocks any more."""


class Plan(NamedTuple):
    """What is wanted of a peer."""

    num_blocks: int  # with which the prompt can start then
    names: list[bytes]
    order: list[bytes]  # these and what is here of the rest; what is to leave first comes first


class Pull(NamedTuple):
    """A prompt that waits."""

    beginning: Beginning
    deadline: float  # by time.monotonic()
    done: Future[None]


class Peer:
    """The connection to one producer."""

    def __init__(self, context: zmq.Context, address: str, token: bytes | None, share: KVShare):
        """Raises InvalidParameterError for an address that nobody can have."""
        self.address, self._share = address, share
        # the file whose owner has to be this process's user; with a token, the token is checked
        self._own_file = address.removeprefix("ipc://") if token is None else None
        try:
            self._socket = connect_to_engine(context, address, token)
        except zmq.ZMQError as error:
            raise InvalidParameterError(OPTION, f"cannot connect to {address}: {error}") from None
        self._num_asked = 0
        self.paused_until = self.heard_at = 0.0  # by time.monotonic(); heard: its last answer

    def ask(self, identity: bytes, names: list[bytes], deadline: float, *, reads: bool) -> int:
        """Returns the number of the message. Raises PeerFailure."""
        # what is left of the time that the prompt may wait
        wait_s = max(0.0, min(CONNECT_S, deadline - time.monotonic()))
        if not self._socket.poll(int(wait_s * 1000), zmq.POLLOUT):
            raise PeerFailure("there is no connection")
        if self._own_file is not None and not _is_own(self._own_file):
            raise PeerFailure("its socket file is another user's, and there is no key_file")
        self._num_asked += 1
        message = _encode(Ask(self._num_asked, identity, names, reads, self._share))
        with contextlib.suppress(zmq.Again):  # then no answer comes
            self._socket.send(message, zmq.NOBLOCK)
        return self._num_asked

    def receive(
        self, number: int, deadline: float, is_over: Callable[[], bool]
    ) -> tuple[Answer, list[zmq.Frame]]:
        """The answer to a message. Raises PeerFailure, and Unwanted once is_over()."""
        while not is_over():
            wait_s = deadline - time.monotonic()
            if wait_s <= 0:
                raise LateAnswer("it did not answer in time")
            if not self._socket.poll(int(min(wait_s, POLL_S) * 1000) + 1):
                if not has_peer(self._socket):
                    raise PeerFailure("its connection was lost")
                continue
            payload, *blocks = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            try:
                answer = msgspec.msgpack.decode(payload.buffer, type=Answer)
            except msgspec.MsgspecError as error:
                raise PeerFailure(f"its answer is not valid: {error}") from None
            self.heard_at = time.monotonic()
            if answer.number != number:  # to a prompt that did not wait for it
                continue
            if answer.refusal:
                raise PeerFailure(answer.refusal)
            return answer, blocks
        raise Unwanted

    def pause(self) -> None:
        """It is not asked for a while."""
        self.paused_until = time.monotonic() + PAUSE_S

    def close(self) -> None:
        self._socket.close(0)


def _is_own(path: str) -> bool:
    """Whether the file is this user's, or root's. Any user can make one in a folder like /tmp."""
    try:
        return os.stat(path).st_uid in (0, os.geteuid())
    except OSError:
        return False


class BlockPuller:
    """Asks other engines for blocks of prompts, one prompt after the other, in a thread."""

    def __init__(
        self,
        config: KVTransferConfig,
        store: Callable[[], BlockStore],
        transfers: Transfers,
        pieces_per_state: int,
        share: KVShare = KVShare(),
        *,
        has_blocks: bool,
    ):
        """config, store: see BlockSender. has_blocks: whether blocks have bytes. Raises
        InvalidParameterError.
        """
        self._config, self._store, self._transfers = config, store, transfers
        self._num_pieces, self._has_blocks = pieces_per_state, has_blocks
        self._token = None if config.key_file is None else read_token(config.key_file, "key_file")
        self._context = zmq.Context(io_threads=1)
        self._peers = [Peer(self._context, one, self._token, share) for one in config.peers]
        self._waiting: SimpleQueue[Pull | None] = SimpleQueue()
        self._is_closed = threading.Event()
        self._distrusted: dict[bytes, None] = {}  # names that are not asked for
        self._trust = threading.Lock()  # held while a block is kept, or is not trusted any more
        self._is_small = False  # whether the log says so
        self._thread = threading.Thread(target=self._run, name="quire-kv-puller", daemon=True)
        self._thread.start()

    def remove(self, names: Sequence[bytes]) -> None:
        """Forgets blocks that a request that failed has computed or read. They do not come back
        from another engine, which may have sent them.
        """
        with self._trust:
            self._distrusted.update(dict.fromkeys(names))
            while len(self._distrusted) > MOST_NAMES:
                del self._distrusted[next(iter(self._distrusted))]
            self._store().remove(names)

    def fetch(self, beginning: Beginning) -> Future[None] | None:
        """See BlockOffload."""
        store = self._store()
        if self._is_closed.is_set() or self._waiting.qsize() >= MOST_WAITING:
            return None
        plan = self._plan(beginning, store, ALL)
        if plan.num_blocks < len(_most_digests(beginning)) and not self._is_small:
            self._is_small = True
            logger.warning(
                "kv_offloading_size has room for %d blocks: of longer prompts other engines send "
                "the beginning",
                store.num_places,
            )
        if not plan.names:  # this engine has all that there could be
            return None
        done: Future[None] = Future()
        deadline = time.monotonic() + self._config.timeout_s
        self._waiting.put(Pull(beginning, deadline, done))
        return done

    def _run(self) -> None:
        with self._context:
            while (pull := self._waiting.get()) is not None:
                try:
                    self._pull(pull)
                except Unwanted:
                    pass
                except Exception:
                    self._transfers.num_pulls_failed += 1
                    logger.exception("KV blocks of a prompt could not be pulled")
                if pull.done.set_running_or_notify_cancel():
                    pull.done.set_result(None)
            for peer in self._peers:
                peer.close()

    def _pull(self, pull: Pull) -> None:
        """Brings what the peer has that has most; if that fails, what the others have."""
        store, found = self._store(), []
        for peer in [peer for peer in self._peers if peer.paused_until <= time.monotonic()]:
            begin = time.monotonic()
            try:
                found.append((peer, self._look(peer, store, pull)))
            except PeerFailure as failure:
                self._pause(peer, failure, pull, begin)
        is_complete = bool(found)
        while found:
            plans = [self._plan(pull.beginning, store, kept) for _, kept in found]
            index = max(range(len(plans)), key=lambda one: plans[one].num_blocks)
            if not plans[index].names:
                break
            (peer, _), begin = found.pop(index), time.monotonic()
            is_complete = False
            try:
                is_complete = self._read(peer, store, plans[index], pull)
            except PeerFailure as failure:
                self._pause(peer, failure, pull, begin)
            if is_complete:
                break
        self._transfers.num_pulls_failed += not is_complete

    def _is_over(self, pull: Pull) -> bool:
        return self._is_closed.is_set() or pull.done.cancelled()

    def _pause(self, peer: Peer, failure: PeerFailure, pull: Pull, begin: float) -> None:
        """Leaves a peer alone that had a fair time from `begin` on. Others, or the prompts before,
        may have taken a prompt's time. One that has sent something meanwhile is slow, or has a slow
        network.
        """
        is_sending = isinstance(failure, LateAnswer) and peer.heard_at > begin
        if is_sending or pull.deadline - begin < self._config.timeout_s / 2:
            return
        peer.pause()
        logger.warning(
            "no KV blocks from %s for %.0f s, prompts are computed: %s",
            peer.address,
            PAUSE_S,
            failure,
        )

    def _plan(self, beginning: Beginning, store: BlockStore, there: Container[bytes]) -> Plan:
        """What a prompt needs of a peer that has the blocks, and the first pieces of the states,
        `there`; of a prompt that is longer than the store, its beginning.
        """
        num_groups, count = len(beginning.layout.windows), len(_most_digests(beginning))
        while count > 0 and self._num_pieces <= store.num_places:
            plan = self._plan_of(beginning, count, store, there)
            if (excess := len(plan.order) - store.num_places) <= 0:
                return plan
            count = min(count, plan.num_blocks) - -(-excess // num_groups)
        return Plan(0, [], [])

    def _plan_of(
        self, beginning: Beginning, most: int, store: BlockStore, there: Container[bytes]
    ) -> Plan:
        """The same, for the first `most` blocks, whatever room there is."""
        layout, cached, kept = beginning.layout, beginning.cached, store.names()
        digests = beginning.digests[:most]
        here = kept if self._has_blocks else ALL

        def is_here(group: int, index: int) -> bool:
            name = name_in_group(digests[index], group)
            return name in cached or name in here

        def is_missing(group: int, index: int) -> bool:
            name = name_in_group(digests[index], group)
            return not (name in cached or name in here or name in there)

        count = layout.longest_kept(len(digests), is_missing)
        names, pieces = [], self._num_pieces
        has_state, before = not pieces, -1
        while pieces and count != before:
            begun = digests[:count]
            own = beginning.num_to_state if beginning.num_to_state <= count else 0
            own = max(own, count_to_state(kept, begun, pieces))
            before = max(own, count_to_state(there, begun, 1))
            has_state = before == own
            count = layout.longest_kept(before, is_missing)
        order = []
        for index in range(count):
            for group, window in enumerate(layout.windows):
                if index < layout.first_seen(window, count * layout.block_size):
                    continue
                name = name_in_group(digests[index], group)
                if not is_here(group, index):
                    names.append(name)
                if self._has_blocks and name not in cached:
                    order.append(name)
        order.reverse()  # a beginning is of use without its end
        if count and pieces and count != beginning.num_to_state:
            of_state = [piece_name(digests[count - 1], index) for index in range(pieces)]
            names += [] if has_state else of_state
            order += of_state
        return Plan(count, names, order)

    def _look(self, peer: Peer, store: BlockStore, pull: Pull) -> Container[bytes]:
        """What the peer has. Raises PeerFailure."""
        digests, groups = _most_digests(pull.beginning), range(len(pull.beginning.layout.windows))
        names = [name_in_group(one, group) for one in digests for group in groups]
        if not self._has_blocks:
            names = []
        if self._num_pieces:
            names += [piece_name(one, 0) for one in digests]
        number = peer.ask(store.identity, names, pull.deadline, reads=False)
        answer, _ = peer.receive(number, pull.deadline, lambda: self._is_over(pull))
        there = {name for name, is_there in zip(names, answer.has) if is_there}
        with self._trust:
            return there.difference(self._distrusted)

    def _read(self, peer: Peer, store: BlockStore, plan: Plan, pull: Pull) -> bool:
        """Keeps blocks. Returns False if the peer has lost some. Raises PeerFailure, Unwanted."""
        store.touch(plan.order)  # what is here is not to make room for what comes
        try:
            return self._keep(peer, store, plan.names, pull)
        finally:
            store.touch(plan.order)

    def _keep(self, peer: Peer, store: BlockStore, names: list[bytes], pull: Pull) -> bool:
        size, deadline = blocks_at_once(store), pull.deadline
        waiting = deque(names[begin : begin + size] for begin in range(0, len(names), size))
        asked: deque[tuple[int, list[bytes]]] = deque()
        while waiting or asked:
            while waiting and len(asked) < AHEAD:
                some = waiting.popleft()
                asked.append((peer.ask(store.identity, some, deadline, reads=True), some))
            number, some = asked.popleft()
            answer, frames = peer.receive(number, deadline, lambda: self._is_over(pull))
            if not len(frames) == len(answer.checksums) <= len(some):
                raise PeerFailure("its answer is not valid")
            for name, frame, checksum in zip(some, frames, answer.checksums):
                block = [frame.buffer]
                if len(frame.buffer) != store.block_bytes or checksum_of(name, block) != checksum:
                    raise PeerFailure("blocks were damaged on their way")
                # one by one, since a step that needs the store waits for a write
                with self._trust:
                    if name in self._distrusted:
                        return False
                    store.write([(name, block)])
                self._transfers.num_blocks_pulled += 1
                self._transfers.num_bytes_pulled += store.block_bytes
            if len(frames) < len(some):
                return False
        return True

    def close(self) -> None:
        """May be called twice."""
        self._is_closed.set()
        self._waiting.put(None)
        self._thread.join()


def _most_digests(beginning: Beginning) -> Sequence[bytes]:
    """The blocks that one message can name, with the states after them."""
    return beginning.digests[: MOST_NAMES // (len(beginning.layout.windows) + 1)]
