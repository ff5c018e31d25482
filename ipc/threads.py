"""Runs blocking calls in threads that end with the call, beside an event loop or other work.

Must not know: what is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def start_in_thread(function: Callable[[], T]) -> Future[T]:
    """Calls function() in a thread and returns a future of its result or exception.

    An exiting program does not wait for it.
    """
    future: Future[T] = Future()

    name = "quire-beside"
    threading.Thread(target=_fulfil, args=(future, function), name=name, daemon=True).start()
    return future


async def in_thread(
    function: Callable[[], T],
    *,
    on_cancel: Callable[[], None] | None = None,
    discard: Callable[[T], None] | None = None,
    may_abandon: bool = False,
) -> T:
    """Awaits function() in a thread, in this task's context; its exception is raised here.

    A cancellation is raised after the function has returned, so that nothing is left half done:
    `on_cancel` (called in the loop) may tell it to hurry, and `discard` (called in the thread)
    receives the unused result. With `may_abandon` the cancellation is raised at once and the thread
    ends later; use it for functions that hold nothing.
    """
    import asyncio  # 6 MB and 30 ms, which blocking programs do not need
    from contextvars import copy_context

    future: Future[T] = Future()
    thread = threading.Thread(
        target=copy_context().run,
        args=(_fulfil, future, function),
        name="quire-blocking",
        daemon=True,
    )
    thread.start()
    done = asyncio.wrap_future(future)
    cancellation = None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as error:
            if may_abandon:
                raise
            if on_cancel is not None and cancellation is None:
                on_cancel()
            cancellation = error
    thread.join()  # the thread has nothing left to do
    if cancellation is None:
        return done.result()
    if done.exception() is None and discard is not None:
        await in_thread(lambda: discard(done.result()))
    raise cancellation


def _fulfil(future: Future[T], function: Callable[[], T]) -> None:
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
