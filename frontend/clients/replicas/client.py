"""ReplicasClient: an EngineClient over several engines of one model.

Must not know: text, what a request asks for, how an engine is started.

    add ─▶ router ─▶ a replica's client ─▶ its engine        (SupervisedClient replaces the engine)
    get_output ◀─ the first of the replicas' outputs         one task per replica awaits them
    a death: its requests move to other replicas at once, and the dead one restarts meanwhile

A request that was in flight at two deaths, without progress in between, does not move again: the
supervision of its replica finds out which request ends engines (supervision/resubmission.py).

Everything is written for asyncio. In blocking code, calls run an event loop of the client's own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

import msgspec

from ....ipc.config import EngineConfig
from ....ipc.counters import SchedulerStats
from ....ipc.errors import EngineDeadError, EnginePausedError, EngineUsageError
from ....ipc.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    FinishReason,
)
from ....ipc.models.expert_parallel import shares_experts
from ...supervision.resubmission import Entry
from ...supervision.supervised_client import SupervisedClient
from ..client import CLOSED, OF_A_LOOP, QUARANTINED, EngineClient, Restarts
from ..guard import Guard
from .own_loop import OwnLoop
from .replica import Replica
from .requests import PlacedRequests
from .routing import LOST, REPLACED, Router
from .utilities import Utilities
from .waves import WaveCoordinator

logger = logging.getLogger("quire.replicas")

WAIT_INTERVAL_S = 0.02  # between two looks whether a replica has finished its requests


class ReplicasClient(EngineClient):
    """Implements EngineClient over clients of running engines, which are used in asyncio. Engines
    in other processes have the numbers 0, 1, … as engine_index.

    config: of the session, resolved. loop: of blocking code, in which the clients were started;
    None: asyncio. Engines that are not replaced (on_engine_death="fail") end the client when one
    of them dies; others, when none can be started any more.
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        config: EngineConfig,
        loop: OwnLoop | None = None,
    ):
        first = clients[0].ready
        self.asyncio_mode = loop is None
        self.ready = msgspec.structs.replace(first, config=config)
        self.restarts = Restarts()
        self._replicas = [Replica(index, client) for index, client in enumerate(clients)]
        capacity = first.num_blocks * config.cache_config.block_size
        router = Router(len(clients), capacity, config.scheduler_config.max_num_seqs)
        self._router, self._requests = router, PlacedRequests(router)
        self._arrived: deque[tuple[Replica, asyncio.Task]] = deque()  # readers that are done
        self._own_outputs: deque[EngineCoreOutputs] = deque()  # of requests that end here
        self._moved_at: dict[str, float] = {}  # requests that moved, until their next token
        self._absent: set[int] = set()  # replicas that were being replaced, or drain
        self._waiter: asyncio.Future | None = None
        engines: Sequence[Any] = clients  # MPClients where experts are divided
        self._waves = WaveCoordinator(engines) if shares_experts(config) else None
        self._utilities = Utilities(
            self._replicas, router, self._lose, self._raise_if_over, self._waves
        )
        self._may_be_stalled = False  # as in MPClient
        service = config.service_config
        self._replaces_engines = (
            service.on_engine_death == "restart"
            and service.engine_restarts > 0
            and self._waves is None  # then all are replaced at once (group.py)
        )
        self._is_restarting = self._is_closed = False
        self._failure: EngineDeadError | None = None
        self._guard = Guard()
        self._loop = loop
        for replica in self._replicas:
            client = replica.client
            client.journal = partial(self._journal_of, replica.index)
            client.has_requests = partial(self._has_requests, replica.index)
            if isinstance(client, SupervisedClient):
                client.restarts = self.restarts
                client.hand_over = partial(self._hand_over, replica)
        end = weakref.finalize(self, _end_readers, self._replicas, loop, os.getpid())
        self._end = end  # also runs at exit

    @property
    def num_bad_frames(self) -> int:
        return sum(replica.client.num_bad_frames for replica in self._replicas)

    @property
    def num_rejected_peers(self) -> int:
        return sum(replica.client.num_rejected_peers for replica in self._replicas)

    # of engines that end together, as of one (MPClient)

    was_released = False

    @property
    def was_hung(self) -> bool:
        return any(getattr(one.client, "was_hung", False) for one in self._replicas)

    @property
    def exit_signal(self) -> signal.Signals | None:
        """The signal that ended the first of those that a signal ended."""
        ends = [getattr(one.client, "exit_signal", None) for one in self._replicas]
        return next(filter(None, ends), None)

    @property
    def engine_pid(self) -> int:
        return self._replicas[0].client.engine_pid  # type: ignore[attr-defined]

    @property
    def is_replacing(self) -> bool:
        """No replica can compute now."""
        return not any(replica.is_up for replica in self._replicas)

    @property
    def num_engines(self) -> int:
        return len(self._replicas)

    def engines_up(self) -> list[bool]:
        return [replica.is_up for replica in self._replicas]

    def _journal_of(self, index: int) -> list[Entry]:
        replica_of = self._requests.replica_of
        return [entry for entry in self.journal() if replica_of(entry[0].request_id) == index]

    def _has_requests(self, index: int) -> bool:
        return self._router.num_requests(index) > 0

    # ------------------------------------------------------------ what both modes use

    def add_request(self, request: EngineCoreRequest) -> None:
        with self._guard:
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
        """Replicas whose next engine is ready take requests again."""
        for index in list(self._absent):
            replica = self._replicas[index]
            if replica.is_up and not replica.is_draining:
                self._absent.discard(index)
                self._router.set_state(index, 0.0)

    def abort_requests(self, request_ids: list[str]) -> None:
        with self._guard:
            self._raise_if_over()
            for index, ids in self._requests.abort(request_ids).items():
                for request_id in ids:
                    self._moved_at.pop(request_id, None)
                try:
                    self._replicas[index].client.abort_requests(ids)
                except EngineDeadError as error:
                    self._lose(self._replicas[index], error)

    def pace_outputs(self, rows_per_s: int) -> None:
        with self._guard:
            self._raise_if_over()
            share = -(-rows_per_s // len(self._replicas))
            for replica in self._usable():
                try:
                    replica.client.pace_outputs(share)
                except EngineDeadError as error:
                    self._lose(replica, error)

    def begin_drain(self) -> None:
        super().begin_drain()
        for replica in self._replicas:
            replica.client.begin_drain()

    def _usable(self) -> list[Replica]:
        return [replica for replica in self._replicas if replica.failure is None]

    def _raise_if_over(self) -> None:
        if self._is_closed:
            raise EngineDeadError(CLOSED)
        if self._failure is not None:
            raise EngineDeadError(*self._failure.args) from self._failure

    # ------------------------------------------------------------ deaths

    def _hand_over(self, replica: Replica, entries: list[Entry]) -> list[Entry]:
        """The replica's engine is gone: its requests move. Returns those that stay."""
        replica.stop_reading()
        self._wake()  # to read the next engine's outputs
        for call in replica.reports:
            call.cancel()
        self._router.prefixes.forget(replica.index)
        self._leave_out(replica)
        # Its last statistics told of requests that are elsewhere now.
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
        """The replica cannot be used any more."""
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
        for request, tokens in self._move(replica, self._journal_of(replica.index)):
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
        """What a reader has read, unless its engine has died since."""
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
                    self.restarts.last_gap_s = time.monotonic() - moved_at
                    self.restarts.gaps_s.append(self.restarts.last_gap_s)
        return outputs

    async def get_output_async(self) -> EngineCoreOutputs:
        self._guard.check_process()
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
        self._guard.check_process()
        self._may_be_stalled |= method in ("pause", "sleep")
        return await self._utilities.call(method, args)

    async def call_each_async(self, method: str, *args: Any) -> dict[int, Any]:
        self._guard.check_process()
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
            while self._has_requests(replica.index) and time.monotonic() < deadline:
                await asyncio.sleep(WAIT_INTERVAL_S)
            await replica.client.restart_engines_async(0.0)
        except EngineDeadError as error:
            self._lose(replica, error)
            self._raise_if_over()
        finally:
            replica.is_draining = False

    # ------------------------------------------------------------ blocking

    def get_output(self) -> EngineCoreOutputs:
        if self.asyncio_mode:
            raise RuntimeError(OF_A_LOOP)
        with self._guard:
            return self._run(self._next_output())

    async def _next_output(self) -> EngineCoreOutputs:
        self._start_reading()
        while self._may_be_stalled and not self._arrived:
            stall = await self.call_utility_async("stall_reason")
            for _ in range(3):  # readers of what came before the answer
                await asyncio.sleep(0)
            if stall is None:
                self._may_be_stalled = False
            elif not self._arrived:
                raise EnginePausedError(stall)
        return await self.get_output_async()

    def call_utility(self, method: str, *args: Any) -> Any:
        with self._guard:
            return self._run(self.call_utility_async(method, *args))

    def restart_engines(self) -> None:
        with self._guard:
            self._run(self.restart_engines_async(0.0))

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._is_closed or self._loop is None:
            coroutine.close()
            self._raise_if_over()
            raise EngineUsageError("this call blocks: in asyncio await its other form")
        return self._loop.run(coroutine)

    # ------------------------------------------------------------ shutdown

    def shutdown(self) -> None:
        if self._guard.is_in_fork:
            return
        self._is_closed = True
        if self._loop is not None:
            self._loop.cancel()
        self._guard.close(self._close, CLOSED)

    def _close(self) -> None:
        self._cancel()
        if self._loop is None:
            for replica in self._replicas:
                replica.client.shutdown()
        elif not self._loop.is_closed:
            self._loop.run(self._shut_down_replicas())
            self._end()

    async def shutdown_async(self) -> None:
        if self._guard.is_in_fork:
            return
        self._is_closed = True
        self._cancel()
        await self._shut_down_replicas()

    def _cancel(self) -> None:
        self._wake()
        self._utilities.cancel()
        for replica in self._replicas:
            replica.stop_reading()

    async def _shut_down_replicas(self) -> None:
        await asyncio.gather(*(replica.client.shutdown_async() for replica in self._replicas))


def _empty(epoch: int, engine_index: int) -> EngineCoreOutputs:
    """What an engine that has not done anything would send."""
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


def _end_readers(replicas: Sequence[Replica], loop: OwnLoop | None, owner_pid: int) -> None:
    """Leaves no pending task behind. Does nothing in a fork."""
    if os.getpid() == owner_pid and loop is not None:
        for replica in replicas:
            replica.stop_reading()
        loop.close()
