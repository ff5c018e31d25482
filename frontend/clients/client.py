"""EngineClient: the interface between the frontend and an engine in any process.

Must not know: text, tokenizers, torch, scheduling, computation.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...ipc.config import EngineConfig
from ...ipc.errors import EngineUsageError
from ...ipc.failures import unpack_exception
from ...ipc.messages import EngineCoreOutputs, EngineCoreRequest, Ready, UtilityResult
from ...ipc.threads import in_thread
from .journal import Journal

CLOSED = "this client was shut down"
QUARANTINED = "the engine died each time it computed this request; see the engine's log"
OF_A_LOOP = "this client belongs to an asyncio loop: await get_output_async() instead"
BLOCKS = "this client is for blocking code: call get_output() instead"
RESTARTED = "the engine is started again"
NOT_REPLACED = (
    "restart_engines needs an engine in a child process that is replaced when it dies "
    "(on_engine_death='restart')"
)


def replaces_engines(config: EngineConfig) -> bool:
    """Returns whether an engine that dies is started again."""
    service = config.service_config
    return service.on_engine_death == "restart" and service.engine_restarts > 0


def result_of(message: UtilityResult) -> Any:
    """Returns the result that a utility's answer carries. Raises its exception."""
    if message.failure is not None:
        raise unpack_exception(message.failure, RuntimeError)
    return message.result


@dataclass
class Restarts:
    """The engines that took the place of dead ones since the client was made."""

    by_cause: Counter[str] = field(default_factory=Counter)  # a signal, "exit" or "daemon"
    num_resumed: int = 0  # requests that continued on another engine
    num_quarantined: int = 0  # requests that ended because engines died of them
    # These are seconds from a death to the next output of a resumed request.
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=4096))
    last_gap: tuple[float, float] | None = None  # when it ended, by time.monotonic(), and seconds

    def add_gap(self, died_at: float) -> None:
        """Notes that a resumed request has an output. died_at: by time.monotonic()."""
        now = time.monotonic()
        self.gaps_s.append(now - died_at)
        self.last_gap = (now, now - died_at)


class EngineClient(ABC):
    """An engine as the frontend sees it.

    Every implementation produces the same outputs in the same order, the same errors and the same
    utilities.

    A client is for blocking code (get_output, call_utility) or for one asyncio loop (the `_async`
    methods), and for one thread at a time. The in-process client is for either, until it is used in
    one of the two ways. The other methods never block and work in both modes. When the engine is
    gone, every method and every waiting call raises EngineDeadError with the cause. A call from a
    second thread of blocking code, or from a fork of the process, raises EngineUsageError.
    `shutdown` never raises and may be called twice and by any thread; other calls then end with
    EngineDeadError. In a fork it does nothing.
    """

    is_shared = False  # other clients may use the engine too: it is a daemon
    num_bad_frames = 0  # invalid frames from the engine, which are dropped
    num_rejected_peers = 0  # connections to this client's sockets that were not the engine's
    ready: Ready  # sent by the engine: resolved configuration, number of KV-cache blocks
    is_replacing = False  # the engine has died, and the next one is not ready
    restarts = Restarts()  # of a client that replaces dead engines; others never change it
    journal: Journal  # of the session, which adds its requests
    engine_pid = 0  # of the engine's process, if it is another one; of the first of several
    was_hung = False  # it was ended because it did not finish a step
    was_released = False  # a daemon has made room for another client

    @property
    def exit_signal(self) -> signal.Signals | None:
        """Returns the signal that has ended the engine's process, if one did."""
        return None

    def begin_drain(self) -> None:  # noqa: B027
        """Says that the program ends soon. From then on, an engine that dies is replaced only for
        requests.
        """

    @property
    def standby_is_ready(self) -> bool | None:
        """Returns whether a standby engine is ready to take the place of a dead one, or None if
        none is wanted.
        """
        return None

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Sends a request.

        Its tokens, or a FinishReason.ERROR row if the engine rejects it, arrive through get_output.
        """

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests. Each unfinished one gets a row with FinishReason.ABORT."""

    @abstractmethod
    def pace_outputs(self, rows_per_s: int) -> None:
        """Lets the engine send the rows of several steps together (see PaceOutputs)."""

    def get_output(self) -> EngineCoreOutputs:
        """Blocks until the next outputs arrive.

        It may be called only while a request of this client is unfinished.

        Raises EnginePausedError if none can arrive because this client paused the engine or put it
        to sleep. If another client of a daemon did so, it waits for that client.
        """
        raise RuntimeError(OF_A_LOOP)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Works as get_output, but waits even if no request is unfinished, so that one task can
        call it in a loop.
        """
        raise RuntimeError(BLOCKS)

    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls one of the utilities (core/utilities.py) between two steps. Returns its result or
        raises its exception.
        """
        raise RuntimeError(OF_A_LOOP)

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        raise RuntimeError(BLOCKS)

    def apply_model(self, function: Callable[[Any], Any]) -> list[Any]:
        """Calls function(model) on each rank between two steps and returns the results in rank
        order. Raises EngineUsageError if the model is in another process, because no function is
        sent there.
        """
        raise EngineUsageError(
            'apply_model needs engine="inproc" and one rank: no function is sent to another '
            "process; collective_rpc calls a worker's method by its name"
        )

    @property
    def num_engines(self) -> int:
        """Returns the number of engines behind this client, whose engine_index is 0, 1, …"""
        return 1

    def engines_up(self) -> list[bool]:
        """Returns which of the engines can compute now."""
        return [not self.is_replacing]

    async def call_each_async(self, method: str, *args: Any) -> dict[int, Any]:
        """Returns what a utility that only reports answers, by engine_index, for the engines that
        can answer.
        """
        return {0: await self.call_utility_async(method, *args)}

    def restart_engines(self) -> None:
        """See BlockingCalls.restart_engines."""
        raise EngineUsageError(NOT_REPLACED)

    async def restart_engines_async(self, drain_timeout_s: float) -> None:
        """See AsyncCalls.restart_engines."""
        raise EngineUsageError(NOT_REPLACED)

    @abstractmethod
    def shutdown(self) -> None:
        """Disconnects. A child engine exits; a daemon stays and drops this client's requests."""

    async def shutdown_async(self) -> None:
        """Works as shutdown, without blocking the loop, because the engine may take one step to
        stop.

        A cancellation is raised when the shutdown is complete.
        """
        await in_thread(self.shutdown)
