"""Starts, reaches, watches and ends ranks that are processes of this machine.

Must not know: what a message holds.

All ranks are children, the first one too: this process outlives any rank that dies, and reports
why. Messages go to all ranks through one ring in shared memory, replies come back through
one ring for each rank.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable

import msgspec

from ...ipc.config import EngineConfig
from ...ipc.machine import available_cores
from ...ipc.models.ranks import num_ranks
from ...ipc.process import ChildProcess
from .messages import RankEnds
from .ring import GroupEnds, RingEnds, RingReader, RingWriter, StageEnds, make_event, set_off

# How long a rank polls for another one's part before it sleeps: about the cost of a sleep and a
# wake-up, and almost nothing where the other rank may need this core.
AWAKE_S, AWAKE_ON_SHARED_CORE_S = 50e-6, 1e-6


def rank_command(ends: RankEnds) -> list[str]:
    """As ipc.process.engine_command."""
    text = msgspec.json.encode(ends).decode()
    return [sys.executable, "-P", "-m", "quire.executor.ranks.rank", "--ends", text]


def make_ends(config: EngineConfig, *, has_store: bool = False) -> list[RankEnds]:
    """The ends of each rank: first those of all ranks of a stage, then those of the next one.
    has_store: tensors do not go through shared memory.
    """
    device, size = config.device_config, num_ranks(config)
    tp, pp = device.tensor_parallel_size, device.pipeline_parallel_size
    commands = RingEnds.create(size)
    links = [[RingEnds.create(1) for _ in range(pp - 1)] for _ in range(tp)]
    groups = [GroupEnds.create(tp) if tp > 1 else None for _ in range(pp)]
    store = os.memfd_create("quire-store") if has_store else None
    awake_s = AWAKE_S if available_cores() >= size else AWAKE_ON_SHARED_CORE_S
    # less than the time after which the engine is ended, which would name no rank
    timeout_s = 0.9 * config.service_config.step_timeout_s
    ends = []
    for rank in range(size):
        stage, part = divmod(rank, tp)
        stages = StageEnds(stage, links[part]) if pp > 1 else None
        replies, times = RingEnds.create(1), (awake_s, timeout_s)
        ends.append(RankEnds(rank, size, commands, replies, groups[stage], stages, store, *times))
    return ends


def fds_of(ends: RankEnds) -> list[int]:
    """The descriptors that a rank inherits."""
    parts = ends.commands, ends.replies, ends.group, ends.stages
    store = [] if ends.store is None else [ends.store]
    return store + [fd for part in parts if part is not None for fd in part.fds]


class LocalRanks:
    """Implements Ranks (multiproc_executor.py)."""

    def __init__(self, config: EngineConfig, *, shares_memory: bool | None = None):
        """shares_memory: tensors go through memory that the ranks share; by default on CPUs."""
        self._stop_fd, self._interrupt_fd = make_event(), make_event()
        if shares_memory is None:
            shares_memory = config.device_config.device == "cpu"
        ends = make_ends(config, has_store=not shares_memory)
        self._fds = sorted({fd for of_rank in ends for fd in fds_of(of_rank)})
        self._alarms = [one.group.alarm() for one in ends if one.group is not None]
        self._commands = RingWriter(ends[0].commands, self._take)
        self._readers = [RingReader(of_rank.replies) for of_rank in ends]
        self.names = [f"rank {of_rank.rank} of {len(ends)}" for of_rank in ends]
        self.processes: list[ChildProcess] = []
        try:
            for name, of_rank in zip(self.names, ends, strict=True):
                command, fds = rank_command(of_rank), fds_of(of_rank)
                self.processes.append(ChildProcess(command, b"k", name=name, pass_fds=fds))
        except BaseException:
            self.end(0.0)
            raise

    def send(self, message: bytes) -> None:
        """See Ranks."""
        self._commands.send(message)

    def _take(self, fd: int) -> None:
        """Like os.eventfd_read, but `interrupt` ends it."""
        poller = select.poll()
        for one in (fd, self._interrupt_fd):
            poller.register(one, select.POLLIN)
        ready = {one for one, _ in poller.poll()}
        if fd not in ready:
            raise InterruptedError("a rank has failed")
        os.eventfd_read(fd)

    def read(
        self, on_message: Callable[[int, bytes], None], on_death: Callable[[str], None]
    ) -> None:
        """See Ranks."""
        poller = select.poll()
        by_fd = {reader.ready_fd: rank for rank, reader in enumerate(self._readers)}
        deaths = {process.pidfd: process for process in self.processes}
        for fd in (*by_fd, *deaths, self._stop_fd):
            poller.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll()]
            if self._stop_fd in ready:
                return
            for fd in ready:
                if fd in by_fd:
                    message = self._readers[by_fd[fd]].receive_slot()
                    if message is not None:
                        on_message(by_fd[fd], message)
            dead = [deaths[fd] for fd in ready if fd in deaths]
            if dead and not any(fd in by_fd for fd in ready):  # its last reply says more
                for process in dead:
                    poller.unregister(process.pidfd)
                on_death(dead[0].describe_death())

    def interrupt(self) -> None:
        """See Ranks."""
        os.eventfd_write(self._interrupt_fd, 1)
        for alarm in self._alarms:
            set_off(alarm)

    def stop(self) -> None:
        """See Ranks."""
        os.eventfd_write(self._stop_fd, 1)

    def end(self, timeout_s: float) -> None:
        """See Ranks."""
        deadline = time.monotonic() + timeout_s
        for process in self.processes:
            process.wait(max(0.0, deadline - time.monotonic()))
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.close(timeout_s)
        for fd in (*self._fds, self._stop_fd, self._interrupt_fd):
            os.close(fd)
