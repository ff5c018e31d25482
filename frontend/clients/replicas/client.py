"""ReplicasClient is an EngineClient over several engines of one model.

Must not know: text, what a request asks for, how an engine is started.

    add ─▶ router ─▶ a replica's client ─▶ its engine        (SupervisedClient replaces the engine)
    get_output ◀─ the first of the replicas' outputs         one task per replica awaits them
    a death: its requests move to other replicas at once, and the dead one restarts meanwhile

A request that was in flight at two deaths, without progress in between, does not move again: the
supervision of its replica finds out which request ends engines (supervision/resubmission.py).
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ....ipc.config import EngineConfig
from ....ipc.counters import SchedulerStats
from ....ipc.errors import EngineDeadError, EngineUsageError
from ....ipc.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    FinishReason,
    Ready,
    WaveReport,
)
from ....ipc.models.expert_parallel import shares_experts
from ..client import CLOSED, QUARANTINED, EngineClient, Restarts, replaces_engines
from ..guard import Owner
from ..journal import Entry, Journal
from .replica import Replica
from .requests import JournalPart, PlacedRequests
from .routing import LOST, REPLACED, Router
from .utilities import Utilities
from .waves import WaveCoordinator

logger = logging.getLogger("quire.replicas")

WAIT_INTERVAL_S = 0.02  # between two looks whether a replica has finished its requests


class Place(NamedTuple):
    """What a replica's client is made with."""

    journal: Journal  # of the replica's requests
    restarts: Restarts  # of all replicas
    hand_over: Callable[[list[Entry]], list[Entry]]  # see SupervisedClient
    on_wave: Callable[[WaveReport], None]  # see MPClient


class ReplicasClient(EngineClient):
    """Implements EngineClient over clients of running engines. Engines in other processes have the
    numbers 0, 1, … as engine_index.

    makers: make the replicas' clients. ready: the first engine's. config: the session's, resolved.
    journal: the session's; if it is None, the client makes one. Engines that are not replaced
    (on_engine_death="fail") end the client when one of them dies. Others end it when none can be
    started any more.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[Place], EngineClient]],
        ready: Ready,
        config: EngineConfig,
        journal: Journal | None = None,
    ):
        self.ready = msgspec.structs.replace(ready, config=config)
        self.journal = Journal() if journal is None else journal
        self.restarts = Restarts()
        capacity = ready.num_blocks * config.cache_config.block_size
        router = Router(len(makers), capacity, config.scheduler_config.max_num_seqs)
        self._router, self._requests = router, PlacedRequests(router)
        self._replicas = [self._make(index, make) for index, make in enumerate(makers)]
        self._arrived: deque[tuple[Replica, asyncio.Task]] = deque()  # readers that are done
        self._own_outputs: deque[EngineCoreOutputs] = deque()  # of requests that end here
        self._moved_at: dict[str, float] = {}  # requests that moved, until their next token
        self._absent: set[int] = set()  # replicas that were being replaced, or drain
        self._waiter: asyncio.Future | None = None
        self._waves: WaveCoordinator | None = None
        if shares_experts(config):
            engines: list[Any] = [one.client for one in self._replicas]  # they have start_wave
            self._waves = WaveCoordinator(engines)
        self._utilities = Utilities(
            self._replicas, router, self._lose, self._raise_if_over, self._waves
        )
        # Engines that share experts are replaced all at once (start.py).
        self._replaces_engines = replaces_engines(config) and self._waves is None
        self._is_restarting = self._is_closed = False
        self._failure: EngineDeadError | None = None
        self._owner = Owner()

    def _make(self, index: int, make: Callable[[Place], EngineClient]) -> Replica:
        journal = JournalPart(self.journal, self._requests, index)
        hand_over = partial(self._hand_over, index)
        client = make(Place(journal, self.restarts, hand_over, self._on_wave))
        return Replica(index, client, journal)

    def _on_wave(self, report: WaveReport) -> None:
        assert self._waves is not None  # engines that do not share experts send no report
        self._waves.on_report(report)

    @property
    def is_shared(self) -> bool:  # type: ignore[override]
        return self._replicas[0].client.is_shared

    @property
    def num_bad_frames(self) -> int:
        return sum(replica.client.num_bad_frames for replica in self._replicas)

    @property
    def num_rejected_peers(self) -> int:
        return sum(replica.client.num_rejected_peers for replica in self._replicas)

    @property
    def was_hung(self) -> bool:
        return any(one.client.was_hung for one in self._replicas)

    @property
    def exit_signal(self) -> signal.Signals | None:
        """Returns the signal that ended the first of those that a signal ended."""
        return next(filter(None, (one.client.exit_signal for one in self._replicas)), None)

    @property
    def engine_pid(self) -> int:
        return self._replicas[0].client.engine_pid

    @property
    def is_replacing(self) -> bool:
        """Returns whether no replica can compute now."""
        return not any(replica.is_up for replica in self._replicas)

    @property
    def num_engines(self) -> int:
        return len(self._replicas)

    def engines_up(self) -> list[bool]:
        return [replica.is_up for replica in self._replicas]

    # ------------------------------------------------------------ requests

    def add_request(self, request: EngineCoreRequest) -> None:
        self._raise_if_over()
        self._look_for_returned()
        self._submit(request)

    def _submit(self, request: EngineCoreRequest, num_moved_tokens: int | None = None) -> None:
        index = self._requests.place(
            request, self._utilities.traced_index, num_moved_tokens=num_moved_tokens
        )
        try:
            self._replicas[index].client.add_request(request)
            if self._waves is not None:
                self._waves.begin()
        except EngineDeadError as error:
            self._requests.end(request.request_id)
            self._lose(self._replicas[index], error)
            self._raise_if_over()
            self._submit(request, num_moved_tokens)
        except BaseException:
            self._requests.end(request.request_id)
            raise

    def _look_for_returned(self) -> None:
        """Lets replicas whose next engine is ready take requests again."""
        for index in list(self._absent):
            replica = self._replicas[index]
            if replica.is_up and not replica.is_draining:
                self._absent.discard(index)
                self._router.set_state(index, 0.0)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._raise_if_over()
        for index, ids in self._requests.abort(request_ids).items():
            for request_id in ids:
                self._moved_at.pop(request_id, None)
            try:
                self._replicas[index].client.abort_requests(ids)
            except EngineDeadError as error:
                self._lose(self._replicas[index], error)

    def pace_outputs(self, rows_per_s: int) -> None:
        self._raise_if_over()
        share = -(-rows_per_s // len(self._replicas))
        for replica in self._usable():
            try:
                replica.client.pace_outputs(share)
            except EngineDeadError as error:
                self._lose(replica, error)

    def begin_drain(self) -> None:
        for replica in self._replicas:
            replica.client.begin_drain()

    def _usable(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.failure is None]

    def _raise_if_over(self) -> None:
        self._owner.check_process()
        if self._is_closed:
            raise EngineDeadError(CLOSED)
        if self._failure is not None:
            raise EngineDeadError(*self._failure.args) from self._failure

    # ------------------------------------------------------------ deaths

    def _hand_over(self, index: int, entries: list[Entry]) -> list[Entry]:
        """Moves the requests of a replica whose engine is gone. Returns those that stay."""
        replica = self._replicas[index]
        replica.stop_reading()
        self._wake()  # to read the next engine's outputs
        for call in replica.reports:
            call.cancel()
        self._router.prefixes.forget(replica.index)
        self._leave_out(replica)
        # Its last statistics counted requests that are elsewhere now.
        self._own_outputs.append(_empty(replica.client.ready.epoch + 1, replica.index))
        return self._move(replica, entries)

    def _leave_out(self, replica: Replica) -> None:
        self._absent.add(replica.index)
        self._router.set_state(replica.index, REPLACED)

    def _move(self, replica: Replica, entries: list[Entry]) -> list[Entry]:
        self._look_for_returned()
        if not any(one.is_up and not one.is_draining for one in self._replicas):
            return entries
        stay: list[Entry] = []
        moving: list[Entry] = []
        for entry in entries:
            (stay if self._requests.is_suspect(entry) else moving).append(entry)
        self._requests.release(moving)
        now = time.monotonic()
        for request, tokens in moving:
            resumed = msgspec.structs.replace(request, resume_tokens=list(tokens))
            self._submit(resumed, len(tokens))
            self._moved_at[request.request_id] = now
        self.restarts.num_resumed += len(moving)
        if moving:
            logger.warning(
                "requests of engine %d that continue on others: %d", replica.index, len(moving)
            )
        return stay

    def _lose(self, replica: Replica, error: EngineDeadError) -> None:
        """Notes that the replica cannot be used any more."""
        if replica.failure is not None or self._is_closed:
            return
        replica.failure = error
        replica.stop_reading()
        self._absent.discard(replica.index)
        self._router.set_state(replica.index, LOST)
        if not self._replaces_engines or not self._usable():
            self._failure = self._failure or error
            return self._wake()
        logger.error("engine %d is not used any more: %s", replica.index, error)
        for request, tokens in self._move(replica, replica.journal.entries()):
            self._requests.end(request.request_id)
            self._own_outputs.append(
                EngineCoreOutputs(
                    0,
                    [request.request_id],
                    [len(tokens)],
                    [0],
                    [],
                    [Finished(0, FinishReason.ERROR, error=QUARANTINED)],
                    engine_index=len(self._replicas),  # of none of them
                    timestamp=time.monotonic(),
                )
            )
        self._wake()

    # ------------------------------------------------------------ outputs

    def _start_reading(self) -> None:
        loop = asyncio.get_running_loop()
        for replica in self._replicas:
            if replica.reader is None and replica.failure is None:
                replica.reader = loop.create_task(replica.client.get_output_async())
                replica.reader.add_done_callback(partial(self._on_read, replica))

    def _on_read(self, replica: Replica, reader: asyncio.Task) -> None:
        if not reader.cancelled():
            reader.exception()  # it may be dropped
        if replica.reader is reader:
            self._arrived.append((replica, reader))
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self, replica: Replica, reader: asyncio.Task) -> EngineCoreOutputs | None:
        """Returns what a reader has read, unless its engine has died since."""
        if replica.reader is not reader:
            return None
        replica.reader = None
        if reader.cancelled():
            return None
        if (error := reader.exception()) is None:
            return reader.result()
        if not isinstance(error, EngineDeadError):
            raise error
        self._lose(replica, error)
        return None

    def _note(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        ids = outputs.request_ids
        for row, _ in outputs.num_cached_tokens:  # of requests with a first token
            self._requests.begin(ids[row])
        for finished in outputs.finished:
            self._requests.end(ids[finished.row])
            self._moved_at.pop(ids[finished.row], None)
        if self._moved_at:
            for request_id, num_tokens in zip(ids, outputs.num_tokens):
                if num_tokens and (moved_at := self._moved_at.pop(request_id, None)) is not None:
                    self.restarts.add_gap(moved_at)
        return outputs

    async def get_output_async(self) -> EngineCoreOutputs:
        while True:
            self._raise_if_over()
            if self._own_outputs:
                return self._own_outputs.popleft()
            self._start_reading()
            while self._arrived:
                if (outputs := self._take(*self._arrived.popleft())) is not None:
                    return self._note(outputs)
            if self._own_outputs or self._failure is not None:
                continue
            if any(one.reader is None and one.failure is None for one in self._replicas):
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    # ------------------------------------------------------------ the engines as a whole

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return await self._utilities.call(method, args)

    async def call_each_async(self, method: str, *args: Any) -> dict[int, Any]:
        return await self._utilities.call_each(method, args)

    async def restart_engines_async(self, drain_timeout_s: float) -> None:
        if self._is_restarting:
            raise EngineUsageError("the engines are being restarted already")
        self._is_restarting = True
        try:
            for replica in self._usable():
                await self._restart(replica, drain_timeout_s)
        finally:
            self._is_restarting = False

    async def _restart(self, replica: Replica, drain_timeout_s: float) -> None:
        deadline = time.monotonic() + drain_timeout_s
        replica.is_draining = True
        self._leave_out(replica)
        try:
            while replica.journal and time.monotonic() < deadline:
                await asyncio.sleep(WAIT_INTERVAL_S)
            await replica.client.restart_engines_async(0.0)
        except EngineDeadError as error:
            self._lose(replica, error)
            self._raise_if_over()
        finally:
            replica.is_draining = False

    # ------------------------------------------------------------ shutdown

    def shutdown(self) -> None:
        if not self._owner.is_in_fork:
            self._cancel()
            for replica in self._replicas:
                replica.client.shutdown()

    async def shutdown_async(self) -> None:
        if not self._owner.is_in_fork:
            self._cancel()
            await asyncio.gather(*(one.client.shutdown_async() for one in self._replicas))

    def _cancel(self) -> None:
        self._is_closed = True
        self._wake()
        self._utilities.cancel()
        for replica in self._replicas:
            replica.stop_reading()


def _empty(epoch: int, engine_index: int) -> EngineCoreOutputs:
    """Returns what an engine that has not done anything would send."""
    return EngineCoreOutputs(
        epoch,
        [],
        [],
        [],
        [],
        stats=SchedulerStats(),
        timestamp=time.monotonic(),
        engine_index=engine_index,
    )
