"""The one interface between the frontend and an engine, whatever its form.

Must not know: text, tokenizers, torch; who schedules or computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ...ipc.messages import EngineCoreOutputs, EngineCoreRequest, Ready
from ...ipc.threads import in_thread

CLOSED = "this client was shut down"


class EngineClient(ABC):
    """An engine as the frontend sees it.

    All forms give the same outputs, order, errors and utilities.

    One client is used either from blocking code (get_output, call_utility) or from one asyncio loop
    (the `_async` pair), by one thread at a time. The other methods never block and serve both. When
    the engine is gone every method, and every waiter inside one, raises EngineDeadError with the
    cause. A second thread, and every call in a fork of the process, gets EngineUsageError.
    `shutdown` never raises, may be called twice and by any thread: calls of others then end with
    EngineDeadError. In a fork it does nothing.
    """

    is_shared = False  # others may use the engine too: it is a daemon
    num_bad_frames = 0  # from the engine, dropped
    ready: Ready  # the engine's word on itself: resolved configuration, number of KV-cache blocks

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hands over a request.

        Its tokens, or its refusal as a FinishReason.ERROR row, come through get_output.
        """

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests. Each one still alive is answered by a row with FinishReason.ABORT."""

    @abstractmethod
    def pace_outputs(self, rows_per_s: int) -> None:
        """From now on the rows of several steps may come together; see PaceOutputs."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """Blocks for the next outputs.

        To be called only while a request of this client is unfinished.

        Raises EnginePausedError when none can come because this client itself has paused the engine
        or put it to sleep. When another client of a daemon has done it, it waits for that client.
        """

    @abstractmethod
    async def get_output_async(self) -> EngineCoreOutputs:
        """As get_output; waits as long as there is nothing to tell, so that one task can loop over
        it for ever.
        """

    @abstractmethod
    def call_utility(self, method: str, *args: Any) -> Any:
        """Calls one of EngineCore.UTILITIES between two steps and returns its result, or raises its
        exception.
        """

    @abstractmethod
    async def call_utility_async(self, method: str, *args: Any) -> Any: ...

    @abstractmethod
    def shutdown(self) -> None:
        """Leaves: a child engine exits, a daemon stays and drops this client's requests."""

    async def shutdown_async(self) -> None:
        """As shutdown, while the loop goes on: an engine may take as long as a step to leave.

        A cancellation is raised when it has left.
        """
        await in_thread(self.shutdown)
