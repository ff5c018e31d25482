"""InprocClient alone: its thread in asyncio, cleanup, and the codec round trip. test_client.py has
the contract.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from functools import partialmethod

import pytest
from quire.core.engine_core import EngineCore
from quire.frontend.clients.inproc_client import MAX_QUEUED_OUTPUTS, InprocClient
from quire.ipc.errors import EngineDeadError
from quire.ipc.messages import EngineCoreRequest
from quire.ipc.params import SamplingParams
from quire.tests.fake_engine import TroubledExecutor
from quire.tests.fakes import make_config


def open_client(**arguments) -> InprocClient:
    config = make_config(**arguments)
    return InprocClient(config, executor=TroubledExecutor(config))


def request(request_id: str = "a", max_tokens: int = 200) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id, [1, 2], SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens)
    )


def test_start_up_errors_are_those_of_the_engine():
    with pytest.raises(ValueError, match="cheese"):
        open_client(hf_overrides={"at_load": "fail"})


def test_blocking_use_has_no_thread_and_steps_on_demand():
    client, threads = open_client(), threading.active_count()
    executor = client._engine.core.executor
    client.add_request(request())
    assert executor.steps == []
    client.get_output()
    assert len(executor.steps) == 1 and threading.active_count() <= threads
    client.shutdown()
    assert executor.is_shut_down


def test_waiting_without_requests_is_an_error():
    client = open_client()
    with pytest.raises(RuntimeError, match="nothing to wait for"):
        client.get_output()
    client.shutdown()


def test_a_failed_step_keeps_its_traceback():
    client = open_client(hf_overrides={"raise_at_step": 0})
    client.add_request(request())
    with pytest.raises(EngineDeadError) as caught:
        client.get_output()
    assert isinstance(caught.value.__cause__, RuntimeError)
    client.shutdown()


def test_the_thread_ends_with_the_client():
    async def main() -> None:
        before = set(threading.enumerate())  # those of earlier tests may end meanwhile
        client = open_client(hf_overrides={"delay_s": 0.01})
        client.add_request(request())
        await client.get_output_async()
        assert set(threading.enumerate()) - before == {client._engine.thread}
        with pytest.raises(RuntimeError, match="get_output_async"):
            client.get_output()
        waiter = asyncio.create_task(client.get_output_async())
        client.abort_requests(["a"])
        await waiter
        client.shutdown()
        assert not set(threading.enumerate()) - before

    asyncio.run(main())


def test_an_unclosed_client_is_collected():
    async def main() -> tuple:
        client = open_client()
        assert await client.call_utility_async("ping") == "pong"
        return weakref.ref(client), client._engine

    client, engine = asyncio.run(main())
    gc.collect()
    engine.thread.join(60)
    assert client() is None and engine.core.executor.is_shut_down and not engine.thread.is_alive()


def test_the_thread_does_not_run_far_ahead_and_continues():
    async def main() -> None:
        client = open_client(max_model_len=2048, num_gpu_blocks_override=300)
        client.add_request(request(max_tokens=1000))
        num_tokens = len((await client.get_output_async()).token_ids)
        await asyncio.sleep(0.5)
        assert MAX_QUEUED_OUTPUTS - 1 <= len(client._engine.outputs) <= MAX_QUEUED_OUTPUTS
        # blocked, but still handles calls
        assert await asyncio.wait_for(client.call_utility_async("ping"), 60) == "pong"
        while num_tokens < 1000:
            outputs = await asyncio.wait_for(client.get_output_async(), 60)
            assert outputs.first_indices == [num_tokens]
            num_tokens += len(outputs.token_ids)
        client.shutdown()

    asyncio.run(main())


def test_waiters_of_a_client_that_is_shut_down():
    async def main() -> None:
        client = open_client()
        waiter = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0.05)
        client.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            await asyncio.wait_for(waiter, 60)

    asyncio.run(main())


def test_adds_and_aborts_from_the_loop_never_race_the_step(monkeypatch):
    checked = partialmethod(EngineCore.__init__, check_every_step=True)
    monkeypatch.setattr(EngineCore, "__init__", checked)

    async def main() -> None:
        client = open_client(max_num_seqs=64)
        finished: set[str] = set()

        async def read() -> None:
            while len(finished) < 200:
                outputs = await client.get_output_async()
                finished.update(outputs.request_ids[end.row] for end in outputs.finished)

        reader = asyncio.create_task(read())
        for i in range(200):
            client.add_request(request(f"r{i}", max_tokens=10))
            if i % 3 == 0:
                client.abort_requests([f"r{i}", f"r{i - 1}"])
            await asyncio.sleep(0)
        await asyncio.wait_for(reader, 60)
        client.shutdown()

    asyncio.run(main())


def test_an_idle_thread_uses_no_cpu():
    async def main() -> None:
        client = open_client()
        waiter = asyncio.create_task(client.get_output_async())
        await asyncio.sleep(0.1)
        cpu = time.process_time()
        await asyncio.sleep(1)
        assert time.process_time() - cpu < 0.02
        waiter.cancel()
        client.shutdown()

    asyncio.run(main())
