"""SupervisedClient is an EngineClient whose engine is replaced when it dies.

Must not know: text, what a request asks for, how its outputs are used.

    death ─▶ wait ─▶ start the next engine ─▶ set what was set in the last one ─▶ submit requests
                 ◀── it died, too ─────────┴──────────────────────────────────┘

One task runs this sequence, `_recover`, and all waiting calls await that task. The requests and
their tokens come from the session's journal: the new engine continues each from its last token,
with the same bits.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...ipc.config import EngineConfig
from ...ipc.errors import EngineDeadError, InvalidParameterError, ModelLoadError
from ...ipc.messages import EngineCoreOutputs, EngineCoreRequest, Finished, FinishReason
from ...ipc.threads import in_thread
from ..clients.client import CLOSED, QUARANTINED, RESTARTED, EngineClient, Restarts
from ..clients.guard import Owner
from ..clients.journal import Entry
from .engine_state import DISPENSABLE, EngineState, Weights, check_repeatable
from .recovery import Successors
from .restart_budget import RestartBudget
from .resubmission import Resubmission, is_of

logger = logging.getLogger("quire.supervision")

WAIT_INTERVAL_S = 0.02  # between two looks at a condition


@dataclass
class Loss:
    """An engine that is gone, and what follows for its requests."""

    engine: EngineClient
    death: EngineDeadError
    cause: str  # as Restarts counts it
    is_wanted: bool  # restart_engines has ended it
    entries: list[Entry]  # the requests that continue on the next engine
    culprit: Entry | None  # the request that ends engines, if that is clear
    at: float  # by time.monotonic()


def _everything(entries: list[Entry]) -> list[Entry]:
    return entries


class SupervisedClient(EngineClient):
    """Implements EngineClient over clients of engines that replace each other.

    first: the client of the first engine, which is ready, or of engines that are replaced together.
    engine, command: as in MPClient.start; a daemon is not started but attached to again.
    successors: makes what starts the next ones. hand_over: takes the requests of an engine that is
    gone, and returns those to continue on the next. restarts: counts them.

    When no engine can be started any more, every call raises EngineDeadError. A utility that the
    engine's death interrupted is called again, or, if calling it twice is not the same as once,
    raises EngineRestartedError.
    """

    def __init__(
        self,
        first: EngineClient,
        config: EngineConfig,
        engine: str = "process",
        *,
        command: Sequence[str] | None = None,
        successors: Callable[..., Successors] = Successors,
        hand_over: Callable[[list[Entry]], list[Entry]] = _everything,
        restarts: Restarts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.is_shared = first.is_shared
        self.ready = first.ready
        self.journal = first.journal
        self.restarts = Restarts() if restarts is None else restarts
        self._engine = first
        self._next: EngineClient | None = None  # that is started but not yet in use
        # The next engine has as many blocks as the first, so that what fitted fits again.
        config = msgspec.structs.replace(
            config,
            cache_config=msgspec.structs.replace(
                config.cache_config, num_gpu_blocks_override=first.ready.num_blocks
            ),
        )
        self._successors = successors(config, engine, command, first)
        self._standby = self._successors.standby
        if self._standby is not None:
            weakref.finalize(self, self._standby.close)  # also runs at exit
        self._hand_over = hand_over
        self._unwanted: EngineClient | None = None  # an engine that restart_engines ends
        self._is_exposed = True  # no standby, and none has been asked for
        self._budget = RestartBudget(config.service_config.engine_restarts, clock)
        self._resubmission = Resubmission()
        lora_config = first.ready.config.lora_config
        self._state = EngineState(max_loras=lora_config.max_cpu_loras or lora_config.max_loras)
        self._own_outputs: deque[EngineCoreOutputs] = deque()  # of requests that end here
        self._children: dict[str, list[str]] = {}  # resumed completions of a request with n > 1
        self._died_at: float | None = None  # until the first output of the next engine
        self._awaiting_output: set[str] = set()  # resumed requests
        self._is_closed = self._is_draining = False
        self._failure: EngineDeadError | None = None
        self._owner = Owner()
        self._recovery: asyncio.Task | None = None
        self._num_waiting_calls = 0  # of utilities, for the next engine
        self._prepare_standby()

    @property
    def standby_is_ready(self) -> bool | None:
        return None if self._standby is None else self._standby.is_ready

    @property
    def num_bad_frames(self) -> int:
        return self._engine.num_bad_frames

    @property
    def num_rejected_peers(self) -> int:
        return self._engine.num_rejected_peers

    @property
    def engine_pid(self) -> int:
        return self._engine.engine_pid

    @property
    def num_engines(self) -> int:
        return self._engine.num_engines

    def engines_up(self) -> list[bool]:
        return [not self.is_replacing] * self.num_engines

    async def call_each_async(self, method: str, *args: Any) -> dict[int, Any]:
        if self.num_engines == 1:
            return await super().call_each_async(method, *args)
        return await self._engine.call_each_async(method, *args)

    # ------------------------------------------------------------ requests

    def add_request(self, request: EngineCoreRequest) -> None:
        self._raise_if_over()
        if self.is_replacing or self._resubmission.is_active:
            self._resubmission.add(request)
            return
        try:
            self._engine.add_request(request)
        except EngineDeadError:
            self._raise_if_over()  # otherwise it is in the journal and the next engine gets it
            self._resubmission.note_unsent(request.request_id)

    def abort_requests(self, request_ids: list[str]) -> None:
        self._raise_if_over()
        ids = [one for key in request_ids for one in (key, *self._children.pop(key, ()))]
        self._resubmission.drop(ids)
        self._awaiting_output = {one for one in self._awaiting_output if not is_of(one, ids)}
        self._prepare_standby()
        try:
            self._engine.abort_requests(ids)
            if self._resubmission.is_active:
                self._submit_due()
        except EngineDeadError:
            self._raise_if_over()  # otherwise they are no longer in the journal

    def pace_outputs(self, rows_per_s: int) -> None:
        self._raise_if_over()
        self._state.rows_per_s = rows_per_s
        if self._resubmission.is_active:
            return
        try:
            self._engine.pace_outputs(rows_per_s)
        except EngineDeadError:
            self._raise_if_over()

    def begin_drain(self) -> None:
        self._is_draining = True
        if self._standby is not None:
            self._standby.begin_drain()

    def shutdown(self) -> None:
        if self._owner.is_in_fork:
            return
        self._is_closed = True
        if self._recovery is not None and not self._recovery.get_loop().is_closed():
            self._recovery.cancel()
        self._engine.shutdown()
        if (following := self._next) is not None:
            following.shutdown()
        if self._standby is not None:
            self._standby.close()

    async def shutdown_async(self) -> None:
        if self._owner.is_in_fork:
            return
        self._is_closed = True
        if (recovery := self._recovery) is not None:
            recovery.cancel()
            await asyncio.wait([recovery])
        await self._engine.shutdown_async()
        if (following := self._next) is not None:
            await following.shutdown_async()
        if self._standby is not None:
            await in_thread(self._standby.close)

    def _raise_if_over(self) -> None:
        self._owner.check_process()
        if self._is_closed:
            raise EngineDeadError(CLOSED)
        if self._failure is not None:
            raise EngineDeadError(*self._failure.args) from self._failure

    def _note(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        """Notes the progress of resumed requests, and submits those that wait for it."""
        if self._died_at is not None:
            self._budget.note_progress()
            for request_id, num_tokens in zip(outputs.request_ids, outputs.num_tokens):
                if num_tokens and request_id in self._awaiting_output:
                    self._awaiting_output.discard(request_id)
                    self.restarts.add_gap(self._died_at)
            for finished in outputs.finished:
                self._awaiting_output.discard(outputs.request_ids[finished.row])
            self._resubmission.take(outputs)
            if self._resubmission.is_active:
                self._submit_due()
            elif not self._awaiting_output:
                self._died_at = None
            self._prepare_standby()
        return outputs

    def _prepare_standby(self) -> None:
        """Starts another standby when no resumed request waits, because they would share the
        cores.
        """
        if self._standby is not None and self._is_exposed and not self._awaiting_output:
            self._is_exposed = False
            self._standby.prepare(self.ready.epoch + 1)

    def _submit_due(self) -> None:
        """Submits the requests whose turn it is. Does nothing if the engine has died. The next call
        that waits notices that.
        """
        try:
            for request, tokens in self._resubmission.due():
                self._engine.add_request(
                    msgspec.structs.replace(request, resume_tokens=list(tokens))
                )
            if not self._resubmission.is_active and self._state.rows_per_s:
                self._engine.pace_outputs(self._state.rows_per_s)
        except EngineDeadError:
            logger.debug("the engine died while its requests were submitted")

    def _on_called(self, method: str, args: tuple) -> None:
        """Notes that a utility has succeeded."""
        weights = self._state.weights
        self._state.note(method, args)
        if self._standby is not None and self._state.weights != weights:
            self._standby.set_weights(self._state.weights)

    # ------------------------------------------------------------ recovery

    async def _recover(self, death: EngineDeadError) -> None:
        """Replaces the dead engine. Raises EngineDeadError if that is not possible.

        A daemon that has released this client is attached to again when it is needed.
        """
        if self._engine.was_released:
            await _until(lambda: bool(self.journal) or self._num_waiting_calls > 0)
        self.is_replacing = True
        loss = self._classify(death)
        await loss.engine.shutdown_async()
        if self._is_draining and not self._resubmission.is_active:
            logger.info("%s; it is started again only for a request", death)
            await _until(lambda: self._resubmission.is_active)
        await self._start_next(loss)
        self._resubmit(loss)

    def _classify(self, death: EngineDeadError) -> Loss:
        """Returns why the engine is gone, and which of its requests continue. Plans their order."""
        dead, now = self._engine, time.monotonic()
        if self._died_at is None:
            self._died_at = now
        is_wanted, exit_signal = dead is self._unwanted, dead.exit_signal
        # A request that ended here stays in the journal until the session takes its output.
        ended = {one for outputs in self._own_outputs for one in outputs.request_ids}
        entries = [entry for entry in self.journal.entries() if entry[0].request_id not in ended]
        entries, culprit = self._hand_over(entries), None
        if is_wanted:
            self._resubmission.on_restart(entries)
        else:
            is_killed = self.is_shared or (exit_signal == signal.SIGKILL and not dead.was_hung)
            culprit = self._resubmission.on_death(entries, is_killed=is_killed)
        if is_wanted:
            cause = "request"
        elif self.is_shared:
            cause = "daemon"
        elif dead.was_hung:
            cause = "hang"
        else:
            cause = "exit" if exit_signal is None else exit_signal.name
        entries = [entry for entry in entries if entry is not culprit]
        self._awaiting_output = {request.request_id for request, _ in entries}
        return Loss(dead, death, cause, is_wanted, entries, culprit, now)

    async def _start_next(self, loss: Loss) -> None:
        """Starts engines until one is in use, as often as the budget allows."""
        was_released, first_epoch = loss.engine.was_released, loss.engine.ready.epoch + 1
        is_free = self._resubmission.narrows or was_released or loss.is_wanted
        cause: Exception = loss.death
        num_failed = 0
        while True:
            self._raise_if_over()
            delay_s = self._budget.take(is_free=is_free, num_failed=num_failed)
            if delay_s is None:
                limit = self._budget.max_restarts
                allowed = f"{limit} in 10 minutes, or as many that fail" if limit else "none"
                raise EngineDeadError(
                    f"{cause} (it is not started again: engine_restarts={limit} allows {allowed})"
                )
            if was_released:
                logger.info("%s; this one attaches again in %g s", cause, delay_s)
            elif loss.is_wanted:
                logger.info("%s", cause)
            else:
                logger.error("%s; starting it again in %g s", cause, delay_s)
            await asyncio.sleep(delay_s)
            try:
                return await self._take_into_use(first_epoch + num_failed, loss.engine)
            except ModelLoadError as error:  # such as a model whose files are gone
                raise EngineDeadError(
                    f"{loss.death} (and no engine can be started: {error})"
                ) from error
            except Exception as error:  # it died, or lacked memory, descriptors or space for now
                is_free, cause, num_failed = False, error, num_failed + 1
                if self._next is not None:
                    await self._next.shutdown_async()
                    self._next = None

    async def _take_into_use(self, epoch: int, dead: EngineClient) -> None:
        """Starts an engine and brings it into the state that this client has set."""
        engine, loaded = await self._successors.next(epoch)
        self._next = engine
        self._successors.check_same_model(self.ready, engine.ready)
        if not (dead.was_released and engine.engine_pid == dead.engine_pid):  # else it has it
            await self._restore(engine, loaded)
        self._engine, self._next, self._is_exposed = engine, None, True
        self.ready = engine.ready

    async def _restore(self, engine: EngineClient, loaded: Weights) -> None:
        for method, argument in self._state.calls(loaded):
            try:
                await engine.call_utility_async(method, argument)
            except InvalidParameterError as error:
                if method not in DISPENSABLE:
                    raise
                logger.warning("%s on the next engine: %s", method, error)

    def _resubmit(self, loss: Loss) -> None:
        """Submits the requests of the last engine to the next one."""
        if not loss.engine.was_released:
            self.restarts.by_cause[loss.cause] += 1
        self.is_replacing = False
        if loss.culprit is not None:
            self._quarantine(loss.culprit)
        self._remember_children(loss.entries)
        self.restarts.num_resumed += len(loss.entries)
        logger.warning(
            "the engine is ready again after %.2f s; requests that continue: %d",
            time.monotonic() - loss.at,
            len(loss.entries),
        )
        self._submit_due()
        self._prepare_standby()

    def _quarantine(self, culprit: Entry) -> None:
        """Ends a request because engines die of it."""
        request, tokens = culprit
        self.restarts.num_quarantined += 1
        logger.error("request %s ends: %s", request.request_id, QUARANTINED)
        self._own_outputs.append(
            EngineCoreOutputs(
                self._engine.ready.epoch,
                [request.request_id],
                [len(tokens)],
                [0],
                [],
                [Finished(0, FinishReason.ERROR, error=QUARANTINED)],
                engine_index=self._engine.ready.engine_index,
                timestamp=time.monotonic(),
            )
        )

    def _remember_children(self, entries: list[Entry]) -> None:
        """Remembers the completions of requests with n > 1, because the next engine knows these
        alone.
        """
        self._children = {}
        for request, _ in entries:
            index, _, parent = request.request_id.partition("_")
            if index.isdecimal():  # see child_request_id
                self._children.setdefault(parent, []).append(request.request_id)

    # ------------------------------------------------------------ calls that wait

    async def get_output_async(self) -> EngineCoreOutputs:
        while not self._own_outputs:
            self._raise_if_over()
            engine = self._engine
            try:
                outputs = await engine.get_output_async()
            except EngineDeadError as death:
                await self._recovered(engine, death)
            else:
                if engine is self._engine and not self.is_replacing:  # else it is computed again
                    return self._note(outputs)
        return self._own_outputs.popleft()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        is_repeated = False
        while True:
            self._raise_if_over()
            engine = self._engine
            try:
                result = await engine.call_utility_async(method, *args)
            except EngineDeadError as death:
                self._num_waiting_calls += 1
                try:
                    await self._recovered(engine, death)
                finally:
                    self._num_waiting_calls -= 1
                if not engine.was_released:
                    is_repeated = check_repeatable(method, is_repeated, death)
                continue
            self._on_called(method, args)
            return result

    async def restart_engines_async(self, drain_timeout_s: float = 0.0) -> None:
        if self.is_shared:
            return await super().restart_engines_async(drain_timeout_s)
        if self._recovery is None:
            self._unwanted = self._engine
        await self._recovered(self._engine, EngineDeadError(RESTARTED))

    async def _recovered(self, dead: EngineClient, death: EngineDeadError) -> None:
        """Returns when another engine has taken the place of `dead`."""
        self._raise_if_over()
        if dead is not self._engine and self._recovery is None:
            return
        if self._recovery is None:
            self._recovery = asyncio.get_running_loop().create_task(
                self._run_recovery(death), name="quire engine restart"
            )
        recovery = self._recovery
        await asyncio.wait([recovery])
        self._raise_if_over()
        if not recovery.cancelled() and (error := recovery.exception()) is not None:
            raise error

    async def _run_recovery(self, death: EngineDeadError) -> None:
        try:
            await self._recover(death)
        except EngineDeadError as error:
            self._failure = self._failure or error
        finally:
            self._recovery = None


async def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(WAIT_INTERVAL_S)
