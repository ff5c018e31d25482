"""BlockingClient shows a client of an asyncio loop to blocking code. The loop runs in the thread of
the caller while a call waits.

Must not know: what a call does, how the client reaches its engine.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine
from operator import attrgetter
from typing import Any, TypeVar

from ...ipc.errors import EnginePausedError
from ...ipc.messages import EngineCoreOutputs, EngineCoreRequest
from .client import CLOSED, EngineClient
from .guard import Guard
from .own_loop import OwnLoop

T = TypeVar("T")


class BlockingClient(EngineClient):
    """`client` was made in `loop`. Only this object uses both, and it ends them."""

    ready = property(attrgetter("client.ready"))  # type: ignore[assignment]
    journal = property(attrgetter("client.journal"))  # type: ignore[assignment]
    restarts = property(attrgetter("client.restarts"))  # type: ignore[assignment]
    is_shared = property(attrgetter("client.is_shared"))  # type: ignore[assignment]
    is_replacing = property(attrgetter("client.is_replacing"))  # type: ignore[assignment]
    num_bad_frames = property(attrgetter("client.num_bad_frames"))  # type: ignore[assignment]
    num_rejected_peers = property(attrgetter("client.num_rejected_peers"))  # type: ignore[assignment]
    standby_is_ready = property(attrgetter("client.standby_is_ready"))  # type: ignore[assignment]
    engine_pid = property(attrgetter("client.engine_pid"))  # type: ignore[assignment]
    num_engines = property(attrgetter("client.num_engines"))  # type: ignore[assignment]
    engines_up = property(attrgetter("client.engines_up"))  # type: ignore[assignment]
    begin_drain = property(attrgetter("client.begin_drain"))  # type: ignore[assignment]

    def __init__(self, client: EngineClient, loop: OwnLoop):
        self.client = client
        self._loop = loop
        self._guard = Guard()
        # Whether this client has paused the engine or put it to sleep. Blocking code that then
        # waits for outputs would deadlock. If another client has done it, that client also
        # resumes the engine, so waiting is correct.
        self._may_be_stalled = False
        weakref.finalize(self, loop.close)  # also runs at exit

    def add_request(self, request: EngineCoreRequest) -> None:
        with self._guard:
            self.client.add_request(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        with self._guard:
            self.client.abort_requests(request_ids)

    def pace_outputs(self, rows_per_s: int) -> None:
        with self._guard:
            self.client.pace_outputs(rows_per_s)

    def get_output(self) -> EngineCoreOutputs:
        return self._run(
            self._next_output if self._may_be_stalled else self.client.get_output_async
        )

    def call_utility(self, method: str, *args: Any) -> Any:
        self._may_be_stalled |= method in ("pause", "sleep")
        return self._run(self.client.call_utility_async, method, *args)

    def restart_engines(self) -> None:
        self._run(self.client.restart_engines_async, 0.0)

    def shutdown(self) -> None:
        if not self._guard.is_in_fork:
            self._loop.cancel()
            self._guard.close(lambda: self._loop.close(self.client.shutdown_async()), CLOSED)

    def _run(self, call: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        with self._guard:
            return self._loop.run(call(*args))

    async def _next_output(self) -> EngineCoreOutputs:
        """Raises EnginePausedError if this client has stopped the engine, and nothing is left of
        what it sent before.
        """
        output = asyncio.ensure_future(self.client.get_output_async())
        try:
            stall = await self.client.call_utility_async("stall_reason")
            if stall is None:
                self._may_be_stalled = False
                return await output
            for _ in range(3):  # the reader of what came before the answer
                await asyncio.sleep(0)
            if not output.done():
                raise EnginePausedError(stall)
            return output.result()
        finally:
            output.cancel()
            await asyncio.wait([output])
            if not output.cancelled():
                output.exception()  # the call's own may have come first
