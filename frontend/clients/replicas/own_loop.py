"""OwnLoop: an event loop of blocking code, which runs while a call does.

Must not know: what the calls are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from ....ipc.errors import EngineDeadError
from ....ipc.threads import begin
from ..client import CLOSED


class OwnLoop:
    """Works also where the calling thread runs another loop, as in a notebook."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task | None = None  # of the call in progress

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Returns its result. Cancels it if an exception comes from outside, such as
        KeyboardInterrupt. Raises EngineDeadError after `cancel`.
        """
        self._task = task = self._loop.create_task(coroutine)
        try:
            return self._run(task)
        except asyncio.CancelledError:
            raise EngineDeadError(CLOSED) from None
        except BaseException:
            if not task.done():
                task.cancel()
                self._run(self._loop.create_task(_end(task)))
            raise
        finally:
            self._task = None

    def _run(self, task: asyncio.Task) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(task)
        return begin(lambda: self._loop.run_until_complete(task)).result()

    def cancel(self) -> None:
        """Ends a call in progress, of any thread."""
        if (task := self._task) is not None:
            self._loop.call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Lets cancelled tasks end. May be called twice; does nothing during a call."""
        if not self._loop.is_closed() and not self._loop.is_running():
            self._run(self._loop.create_task(asyncio.sleep(0)))
            self._loop.close()


async def _end(task: asyncio.Task) -> None:
    await asyncio.wait([task])
