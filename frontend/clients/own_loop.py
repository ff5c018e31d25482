"""OwnLoop is an event loop of blocking code, which runs while a call does.

Must not know: what the calls are.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from ...ipc.errors import EngineDeadError, EngineUsageError
from ...ipc.threads import start_in_thread
from .client import CLOSED
from .guard import Owner

T = TypeVar("T")


class OwnLoop:
    """It also works where the calling thread runs another loop, as in a notebook. Calls then run in
    a thread of their own. In a fork of the process it does nothing.
    """

    def __init__(self) -> None:
        # A fork would share epoll's registrations, and could remove them.
        self._loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        self._task: asyncio.Task | None = None  # of the call in progress
        self._is_cancelled = False
        self._owner = Owner()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns the coroutine's result. Cancels it if an exception comes from outside, such as
        KeyboardInterrupt, and lets it end. Raises EngineDeadError after `cancel`.
        """
        if self._loop.is_running() or self._loop.is_closed():
            coroutine.close()
            if self._loop.is_closed():
                raise EngineDeadError(CLOSED)
            raise EngineUsageError(
                "this engine is in a call of this thread, within which a signal handler or a "
                "callback can only abort requests or shut the engine down: make other calls when "
                "that call has returned"
            )
        self._task = task = self._loop.create_task(coroutine)
        if self._is_cancelled:
            task.cancel()
        try:
            return self._drive(task)
        except asyncio.CancelledError:
            raise EngineDeadError(CLOSED) from None
        finally:
            self._task = None

    def _drive(self, task: asyncio.Task[T]) -> T:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            try:
                return self._loop.run_until_complete(task)
            except BaseException:
                if not task.done():
                    task.cancel()
                    self._loop.run_until_complete(asyncio.wait([task]))
                if not task.cancelled():
                    task.exception()  # it is raised here, or gives way to the one from outside
                raise
        beside = start_in_thread(lambda: self._loop.run_until_complete(task))
        try:
            return beside.result()
        except BaseException:
            if not beside.done():
                self._loop.call_soon_threadsafe(task.cancel)
                beside.exception()
            raise

    def cancel(self) -> None:
        """Ends a call in progress, of any thread, and every later one."""
        self._is_cancelled = True
        if (task := self._task) is not None:
            self._loop.call_soon_threadsafe(task.cancel)

    def close(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Runs `last`, then ends what still runs. May be called twice."""
        if self._loop.is_closed() or self._loop.is_running() or self._owner.is_in_fork:
            if last is not None:
                last.close()
            return
        try:
            self._drive(self._loop.create_task(self._end(last)))
        finally:
            self._loop.close()

    async def _end(self, last: Coroutine[Any, Any, None] | None) -> None:
        if last is not None:
            await last
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the coroutine's result, from a loop that exists for this call only."""
    loop = OwnLoop()
    try:
        return loop.run(coroutine)
    finally:
        loop.close()
