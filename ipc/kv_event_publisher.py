"""Publishes events of the KV cache over ZMQ, and repeats earlier ones on request, as vLLM does.

Must not know: what a block is, the engine core, or who subscribes.

    PUB      topic, number, batch                    numbers: 8 bytes, big-endian
    ROUTER   request:  (identity,) "", first number
             answers:  (identity,) "", number, batch     for each batch that is kept, from this one
                       (identity,) "", -1, ""            at the end

Numbers begin at epoch * 2^40 and rise by one. So they rise over restarts, too, and the first batch
of an engine's life says that no block is cached. A subscriber that misses numbers asks for them; if
the first answer has a higher number than the one it wants, they are lost. A number that is lower
than the last one is another engine's: everything is forgotten.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import deque

import zmq

from .config import EngineConfig, resolved
from .errors import InvalidParameterError
from .kv_events import (
    END_OF_REPLAY,
    EPOCH_BITS,
    Endpoint,
    EventBatch,
    KVCacheEvent,
    KVEventsConfig,
    encode_batch,
    parse_endpoint,
)
from .process import WakePipe
from .sockets import has_message, ipc_path

RETRY_MS = 200  # between attempts to bind an address that another process has
CLOSE_TIMEOUT_S = 1.0

logger = logging.getLogger("quire.engine")


class KVEventPublisher:
    """Owns the sockets, and a thread that uses them. `publish` never waits.

    An address that is in use is taken over when it becomes free: a standby, or a daemon that
    replaces another one, starts before the other has ended. Batches wait meanwhile.
    """

    def __init__(self, config: KVEventsConfig, *, epoch: int = 0, engine_index: int = 0):
        """Raises InvalidParameterError for an address that cannot be used."""
        self._rank = engine_index
        self._topic = config.topic.encode()
        self._next_number = epoch << EPOCH_BITS
        self._waiting: deque[tuple[int, EventBatch]] = deque(maxlen=config.max_queue_size)
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._is_closed = False
        self._context = zmq.Context(io_threads=1)
        self._to_bind: list[tuple[zmq.Socket, Endpoint]] = []
        self._publisher = self._context.socket(zmq.PUB)
        self._publisher.sndhwm = config.hwm
        self._replay: zmq.Socket | None = None
        sockets = [(self._publisher, parse_endpoint(config.endpoint, engine_index))]
        if config.replay_endpoint is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.sndhwm = 0  # it would drop answers
            sockets.append(
                (self._replay, parse_endpoint(config.replay_endpoint, engine_index, must_bind=True))
            )
        try:
            for one, endpoint in sockets:
                if endpoint.is_bound:
                    self._to_bind.append((one, endpoint))
                else:
                    one.connect(endpoint.address)
            self._bind()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            addresses = " or ".join(endpoint.address for _, endpoint in sockets)
            raise InvalidParameterError(
                "kv_events_config", f"cannot use {addresses}: {error}"
            ) from None
        for _, endpoint in self._to_bind:
            logger.warning("KV events: %s is in use; taken when it is free", endpoint.address)
        self._wake = WakePipe()
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: list[KVCacheEvent]) -> None:
        """Sends a batch with these events, if there are any. One thread may call it.

        If more than max_queue_size batches wait, the oldest are dropped.
        """
        if not events:
            return
        batch = EventBatch(time.time(), events, self._rank)  # type: ignore[arg-type]
        self._waiting.append((self._next_number, batch))
        self._next_number += 1
        self._wake.wake()

    def close(self) -> None:
        """Sends what waits. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake.wake()
        self._thread.join(CLOSE_TIMEOUT_S)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake.read_fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(RETRY_MS if self._to_bind and self._waiting else None))
            if self._wake.read_fd in ready:
                self._wake.read()
            try:
                self._bind()
                if not self._to_bind:
                    self._send()
                if self._replay in ready:
                    self._answer()
            except zmq.ZMQError:
                logger.exception("KV events")
            if self._is_closed:
                break
        self._context.destroy(linger=int(1000 * CLOSE_TIMEOUT_S))
        self._wake.close()

    def _bind(self) -> None:
        """Binds what is not bound yet and free."""
        for one, endpoint in self._to_bind.copy():
            if _has_listener(endpoint.address):
                return
            try:
                one.bind(endpoint.address)
            except zmq.ZMQError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                return
            self._to_bind.remove((one, endpoint))

    def _send(self) -> None:
        while self._waiting:
            number, batch = self._waiting.popleft()
            payload = encode_batch(batch)
            self._sent.append((number, payload))
            self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _answer(self) -> None:
        replay = resolved(self._replay)
        while has_message(replay):
            identity, *frames = replay.recv_multipart()
            if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
                logger.warning("KV events: a request for a replay that is not one")
                continue
            first = int.from_bytes(frames[1], "big")
            for number, payload in self._sent:
                if number >= first:
                    replay.send_multipart((identity, b"", number.to_bytes(8, "big"), payload))
            replay.send_multipart((identity, b"", END_OF_REPLAY, b""))


def _has_listener(address: str) -> bool:
    """Whether a process listens at a socket file, which ZMQ would take away from it."""
    if not address.startswith("ipc://"):
        return False  # the system refuses to bind it twice
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(ipc_path(address, "kv_events_config").as_posix()) in (
            0,
            errno.EAGAIN,
        )


def make_publisher(
    config: EngineConfig, epoch: int = 0, engine_index: int = 0
) -> KVEventPublisher | None:
    """The publisher that a configuration asks for. Raises InvalidParameterError."""
    if not config.cache_config.publishes_kv_events:
        return None
    events = resolved(config.cache_config.kv_events_config)
    index = engine_index or config.device_config.data_parallel_rank
    return KVEventPublisher(events, epoch=epoch, engine_index=index)
