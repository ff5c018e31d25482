"""Carries commands and replies of ranks on other machines over TCP.

Must not know: what a message holds, what starts the ranks (ray_ranks.py).

The engine has two sockets for each rank, on one address of its machine. They are CURVE servers as
in ipc/sockets.py: encrypted, and closed to peers that do not know the key of this start. Addresses
of the ranks' own connections (torch_links.py) travel the same way, from one rank to all.

A connection that is lost ends both sides: the engine, with the cause, and the rank.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import zmq

from ...ipc.config import EngineConfig
from ...ipc.errors import EngineStartError
from ...ipc.models.ranks import num_ranks
from ...ipc.process import WakePipe
from ...ipc.sockets import bind_network, connect_network, has_peer, make_context, make_wire
from .messages import NetworkEnds, host_name

if TYPE_CHECKING:
    from ..groups.tensor_group import TensorGroup

START_TIMEOUT_S = 120.0  # of a rank, until it is connected
CHECK_S = 0.2  # between two checks of the connections
CAUSE_TIMEOUT_S = 1.0  # for the launcher to say why a rank is gone
_MESSAGE, _ADDRESS = b"message", b"address"  # the first frame


# ---------------------------------------------------------------- the engine's side


class Launcher(Protocol):
    """Starts ranks, and knows why they end."""

    @property
    def host(self) -> str:
        """The address of this machine that the ranks can reach."""
        ...

    def start(self, ends: list[NetworkEnds]) -> None:
        """Begins to start them. Raises EngineStartError."""
        ...

    def cause_of(self, rank: int, timeout_s: float) -> str | None:
        """Why a rank has ended; None if it has not ended within `timeout_s`."""
        ...

    def end(self, timeout_s: float) -> None:
        """Ends the ranks, which have so long to leave. Called once."""
        ...


class NetworkRanks:
    """Implements Ranks (multiproc_executor.py)."""

    def __init__(self, config: EngineConfig, launcher: Launcher):
        """Raises EngineStartError if the ranks do not start."""
        device, size = config.device_config, num_ranks(config)
        self.names = [f"rank {rank} of {size}" for rank in range(size)]
        self._hosts: dict[int, str] = {}  # addresses of the ranks' machines
        self._launcher = launcher
        self._lock = threading.Lock()  # of the sockets for commands
        self._stop = WakePipe()
        self._context = make_context()
        wire, secret_key = make_wire()
        self._commands: list[zmq.Socket] = []
        self._replies: list[zmq.Socket] = []
        ends = []
        for rank in range(size):
            push, commands = bind_network(self._context, zmq.PUSH, secret_key, launcher.host)
            pull, replies = bind_network(self._context, zmq.PULL, secret_key, launcher.host)
            self._commands.append(push)
            self._replies.append(pull)
            tp, pp = device.tensor_parallel_size, device.pipeline_parallel_size
            timeout_s = config.service_config.step_timeout_s
            ends.append(NetworkEnds(rank, tp, pp, commands, replies, wire.key, timeout_s))
        try:
            launcher.start(ends)
            self._wait_for_ranks()
        except BaseException:
            self.end(0.0)
            raise

    def _wait_for_ranks(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        for rank, push in enumerate(self._commands):
            while not has_peer(push):
                if (cause := self._launcher.cause_of(rank, 0.05)) is not None:
                    raise EngineStartError(f"{self.names[rank]} did not start: {cause}")
                if time.monotonic() > deadline:
                    raise EngineStartError(
                        f"{self.names[rank]} did not connect to {self._launcher.host} within "
                        f"{START_TIMEOUT_S:.0f} s"
                    )

    def send(self, message: bytes) -> None:
        """See Ranks."""
        self._send([_MESSAGE, message])

    def _send(self, frames: list[bytes]) -> None:
        with self._lock:
            for push in self._commands:
                with contextlib.suppress(zmq.Again):  # it is gone, as `read` notices
                    push.send_multipart(frames, zmq.NOBLOCK)

    def read(
        self, on_message: Callable[[int, bytes], None], on_death: Callable[[str], None]
    ) -> None:
        """See Ranks."""
        poller = zmq.Poller()
        ranks = {pull: rank for rank, pull in enumerate(self._replies)}
        for one in (*ranks, self._stop.read_fd):
            poller.register(one, zmq.POLLIN)
        is_alive = True
        while True:
            ready = [one for one, _ in poller.poll(int(CHECK_S * 1000))]
            if self._stop.read_fd in ready:
                return
            for one in ready:
                kind, *rest = one.recv_multipart(zmq.NOBLOCK)
                if kind == _MESSAGE:
                    on_message(ranks[one], rest[0])
                else:
                    name, address = rest
                    if name.decode() == host_name(ranks[one]):
                        self._hosts[ranks[one]] = address.decode()
                    self._send([kind, name, address])
            if is_alive and not ready:  # its last reply says more
                with self._lock:
                    lost = [rank for rank, push in enumerate(self._commands) if not has_peer(push)]
                if lost:
                    is_alive = False
                    on_death(self._describe_death(lost))

    def _describe_death(self, lost: list[int]) -> str:
        deadline = time.monotonic() + CAUSE_TIMEOUT_S
        for rank in lost:
            timeout_s = max(0.0, deadline - time.monotonic())
            if (cause := self._launcher.cause_of(rank, timeout_s)) is not None:
                return f"{self.names[rank]} is gone: {cause}"
        host = self._hosts.get(lost[0], "an unknown machine")
        return f"{self.names[lost[0]]} is gone: its connection to {host} was lost"

    def interrupt(self) -> None:
        """See Ranks: `send` never waits."""

    def stop(self) -> None:
        """See Ranks."""
        self._stop.wake()

    def end(self, timeout_s: float) -> None:
        """See Ranks."""
        self._launcher.end(timeout_s)
        for one in (*self._commands, *self._replies):
            one.close()
        self._context.term()
        self._stop.close()


# ---------------------------------------------------------------- a rank's side


class NetworkLinks:
    """Implements RankLinks (rank.py)."""

    def __init__(self, ends: NetworkEnds, host: str, on_lost: Callable[[], None]):
        """Waits for the engine. host: the address of this machine that other ranks can reach.
        on_lost: called in another thread when the engine is gone.

        Raises TimeoutError.
        """
        self.rank = ends.rank
        self._ends, self._host, self._on_lost = ends, host, on_lost
        self._addresses: dict[str, bytes] = {}
        self._received: deque[bytes] = deque()  # commands that came before an awaited address
        self._lock = threading.Lock()  # of the socket for replies
        self._context = make_context()
        self._commands = connect_network(self._context, zmq.PULL, ends.commands, ends.key)
        self._replies = connect_network(self._context, zmq.PUSH, ends.replies, ends.key)
        if not self._replies.poll(int(START_TIMEOUT_S * 1000), zmq.POLLOUT):
            raise TimeoutError(f"the engine at {ends.replies} cannot be reached")
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="quire-engine", daemon=True)
        self._thread.start()

    def receive(self) -> bytes:
        """See RankLinks."""
        while not self._received:
            self._receive()
        return self._received.popleft()

    def _receive(self) -> None:
        kind, *rest = self._commands.recv_multipart()
        if kind == _MESSAGE:
            self._received.append(rest[0])
        else:
            self._addresses[rest[0].decode()] = rest[1]

    def send(self, reply: bytes) -> None:
        """See RankLinks."""
        self._send([_MESSAGE, reply])

    def _send(self, frames: list[bytes]) -> None:
        # zmq.Again: the engine is gone, and `_watch` ends this process
        with self._lock, contextlib.suppress(zmq.Again):
            self._replies.send_multipart(frames, zmq.NOBLOCK)

    def make_group(self, config: EngineConfig) -> TensorGroup:
        """See RankLinks. Waits for the other ranks."""
        from .torch_links import network_group

        ends = self._ends
        sizes = ends.tensor_parallel_size, ends.pipeline_parallel_size
        return network_group(ends.rank, *sizes, self, self._host, ends.timeout_s)

    def publish(self, name: str, address: bytes) -> None:
        """See Addresses (torch_links.py)."""
        self._send([_ADDRESS, name.encode(), address])

    def look_up(self, name: str) -> bytes:
        """See Addresses (torch_links.py). The thread that receives calls it."""
        while name not in self._addresses:
            self._receive()
        return self._addresses[name]

    def _watch(self) -> None:
        while not self._is_closed.wait(CHECK_S):
            with self._lock:
                is_connected = has_peer(self._replies)
            if not is_connected:
                self._on_lost()
                return

    def close(self) -> None:
        """Ends the connections, after the last message was received."""
        self._is_closed.set()
        self._thread.join()
        for one in (self._commands, self._replies):
            one.close()
        self._context.term()
