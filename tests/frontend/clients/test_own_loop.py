"""An event loop of blocking code: what interrupts a call, and where it may be used."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
from quire.frontend.clients.own_loop import OwnLoop, run_once
from quire.ipc.errors import EngineDeadError, EngineUsageError


@pytest.fixture
def loop():
    loop = OwnLoop()
    yield loop
    loop.close()


async def wait(ended: list[str]) -> None:
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.01)  # what a call still has to do
        ended.append("ended")


def interrupt_soon() -> None:
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()


def test_an_interrupt_ends_a_call_at_once_and_completely(loop) -> None:
    ended: list[str] = []
    interrupt_soon()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        loop.run(wait(ended))
    assert ended == ["ended"] and time.monotonic() - begin < 10
    assert loop.run(asyncio.sleep(0, "works")) == "works"


def test_a_call_beside_a_running_loop_is_interrupted_too(loop) -> None:
    """As in a notebook, whose thread runs a loop."""
    ended: list[str] = []

    async def cell() -> None:
        assert loop.run(asyncio.sleep(0, "works")) == "works"
        interrupt_soon()
        with pytest.raises(KeyboardInterrupt):
            loop.run(wait(ended))
        assert ended == ["ended"]
        assert loop.run(asyncio.sleep(0, "works")) == "works"

    outer = asyncio.new_event_loop()  # asyncio.run would handle the signal
    outer.run_until_complete(cell())
    outer.close()


def test_cancel_ends_a_call_of_another_thread_and_later_ones(loop) -> None:
    ended: list[str] = []
    threading.Timer(0.1, loop.cancel).start()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="shut down"):
            loop.run(wait(ended))
    loop.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        loop.run(wait(ended))


def test_a_call_within_a_call_is_refused(loop) -> None:
    async def call() -> None:
        with pytest.raises(EngineUsageError, match="in a call of this thread"):
            loop.run(asyncio.sleep(0))

    loop.run(call())


def test_what_still_runs_ends_with_the_loop() -> None:
    ended: list[str] = []

    async def begin() -> asyncio.Task:
        return asyncio.create_task(wait(ended))

    loop = OwnLoop()
    task = loop.run(begin())
    loop.run(asyncio.sleep(0))
    loop.close(asyncio.sleep(0))
    loop.close()
    assert ended == ["ended"] and task.cancelled()


def test_a_fork_that_drops_the_loop_does_not_disturb_it() -> None:
    async def answered() -> bytes:
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        reader, writer = os.pipe()
        loop.add_reader(reader, lambda: waiter.set_result(os.read(reader, 9)))
        if (pid := os.fork()) == 0:
            loop.remove_reader(reader)  # as a loop does that is closed
            os._exit(0)
        os.waitpid(pid, 0)
        os.write(writer, b"there")
        try:
            return await asyncio.wait_for(waiter, 60)
        finally:
            loop.remove_reader(reader)
            os.close(reader)
            os.close(writer)

    assert run_once(answered()) == b"there"
