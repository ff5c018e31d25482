"""A recovery runs alike in blocking code and in asyncio, and `close` ends what waits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from quire.frontend.supervision.recovery import Recovery, Sleep, Start, Successors, run, run_async
from quire.ipc.errors import EngineDeadError, EngineStartError
from quire.tests.fakes import make_config


@pytest.fixture(params=["blocking", "asyncio"])
def drive(request):
    def drive_(recovery: Recovery, perform) -> None:
        async def perform_async(action):
            await asyncio.sleep(0)
            return perform(action)

        if request.param == "blocking":
            run(recovery, perform)
        else:
            asyncio.run(run_async(recovery, perform_async))

    return drive_


def test_answers_and_errors_reach_the_recovery(drive) -> None:
    seen = []

    def recovery() -> Recovery:
        seen.append((yield Sleep(1.0)))
        try:
            yield Start(7)
        except EngineStartError as error:
            seen.append(str(error))
        seen.append((yield Start(8)))

    def perform(action):
        if action == Start(7):
            raise EngineStartError("not yet")
        return action

    drive(recovery(), perform)
    assert seen == [Sleep(1.0), "not yet", Start(8)]


def test_what_the_recovery_raises_is_raised(drive) -> None:
    def recovery() -> Recovery:
        yield Sleep(0.0)
        raise EngineDeadError("over")

    with pytest.raises(EngineDeadError, match="over"):
        drive(recovery(), lambda action: None)


def test_close_ends_a_wait(tmp_path) -> None:
    """Of blocking code; in asyncio the task is cancelled."""
    successors = Successors(make_config(), f"ipc://{tmp_path / 'none.sock'}", None)
    threading.Timer(0.1, successors.close).start()
    begin = time.monotonic()
    with pytest.raises(EngineDeadError, match="was shut down"):
        successors.perform(Start(0))
    successors.perform(Sleep(60.0))
    assert time.monotonic() - begin < 20
