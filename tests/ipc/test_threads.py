"""in_thread and begin: results, exceptions and cancellation of blocking calls in parallel with an
event loop or other work.
"""

from __future__ import annotations

import asyncio
import threading

import pytest
from quire.ipc.threads import in_thread, start_in_thread


def new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    return set(threading.enumerate()) - before  # threads of earlier tests may end in the meantime


def test_results_and_exceptions():
    before = set(threading.enumerate())

    async def main() -> None:
        assert (
            await in_thread(lambda: threading.current_thread() is threading.main_thread()) is False
        )
        with pytest.raises(ZeroDivisionError):
            await in_thread(lambda: 1 / 0)
        assert not new_threads(before)

    asyncio.run(main())


def test_begun_calls_run_in_parallel_and_keep_their_result_or_exception():
    may_go_on = threading.Event()
    slow = start_in_thread(lambda: may_go_on.wait(60) and threading.current_thread().daemon)
    assert not slow.done()
    may_go_on.set()
    assert slow.result(60) is True
    with pytest.raises(ZeroDivisionError):
        start_in_thread(lambda: 1 / 0).result(60)


def test_a_cancellation_waits_for_the_end_and_drops_the_result():
    before = set(threading.enumerate())

    async def main() -> None:
        begun, go_on, discarded = threading.Event(), threading.Event(), []

        def work() -> str:
            begun.set()
            assert go_on.wait(60)
            return "result"

        task = asyncio.create_task(in_thread(work, on_cancel=go_on.set, discard=discarded.append))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert discarded == ["result"] and not new_threads(before)

    asyncio.run(main())


def test_a_second_cancellation_still_waits():
    async def main() -> None:
        go_on, ended = threading.Event(), []

        def work() -> None:
            assert go_on.wait(60)
            ended.append(True)

        task = asyncio.create_task(in_thread(work))
        for _ in range(2):
            await asyncio.sleep(0.01)
            task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [True]

    asyncio.run(main())


def test_an_abandonable_call_is_not_awaited():
    before = set(threading.enumerate())

    async def main() -> None:
        go_on = threading.Event()
        task = asyncio.create_task(in_thread(lambda: go_on.wait(60), may_abandon=True))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(new_threads(before)) == 1
        go_on.set()

    asyncio.run(main())
