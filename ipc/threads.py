"""Blocking calls beside an event loop or beside other work, each in a thread of its own that ends
with it: no pool whose threads stay.

Must not know: what is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(function: Callable[[], T]) -> Future[T]:
    """Calls function() in a thread; its result or its exception is the future's.

    An exiting program does not wait for it.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="quire-beside", daemon=True).start()
    return future


async def in_thread(
    function: Callable[[], T],
    *,
    on_cancel: Callable[[], None] | None = None,
    discard: Callable[[T], None] | None = None,
    may_abandon: bool = False,
) -> T:
    """function() while the loop goes on; its exception is raised here.

    A cancellation is raised when the function has returned, so that nothing is left half done:
    `on_cancel` may tell it to hurry (called in the loop), `discard` gets the result that nobody
    will have (in the thread). `may_abandon`: the cancellation is raised at once, and the thread
    ends when it ends; for functions that hold nothing.
    """
    import asyncio  # costs 6 MB and 30 ms, which blocking programs need not pay

    future: Future[T] = Future()
    is_cancelled = threading.Event()

    def run() -> None:
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    thread = threading.Thread(target=run, name="quire-blocking", daemon=True)
    thread.start()
    done, cancellation = asyncio.wrap_future(future), None
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError as error:
            if may_abandon:
                raise
            if on_cancel is not None and not is_cancelled.is_set():
                on_cancel()
            is_cancelled.set()
            cancellation = error
    thread.join()  # it has nothing left to do
    if cancellation is None:
        return done.result()
    if done.exception() is None and discard is not None:
        await in_thread(lambda: discard(done.result()))
    raise cancellation
