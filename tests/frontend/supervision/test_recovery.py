"""Where the next engine comes from: a daemon that has ended is looked for until `shutdown`."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from quire import AsyncLLM
from quire.frontend.clients.mp_client import MPClient
from quire.frontend.clients.own_loop import run_once
from quire.frontend.supervision.supervised_client import SupervisedClient
from quire.ipc.errors import EngineDeadError
from quire.tests.fake_engine import daemon, open_blocking
from quire.tests.fakes import make_config


async def attached(address: str) -> SupervisedClient:
    config = make_config(startup_timeout_s=120.0)
    return SupervisedClient(await MPClient.start(config, address), config, address)


def test_a_shutdown_ends_the_search_for_a_daemon(tmp_path) -> None:
    async def main() -> None:
        with daemon(tmp_path, make_config()) as (address, process):
            client = await attached(address)
            llm = AsyncLLM(client.ready.config, client)
            process.kill()
            call = asyncio.create_task(llm.call_utility("ping"))
            await asyncio.sleep(0.3)
            begin = time.monotonic()
            await llm.shutdown_async()
            with pytest.raises(EngineDeadError, match="was shut down"):
                await call
            assert time.monotonic() - begin < 60

    run_once(main())


def test_a_shutdown_by_another_thread_ends_the_search_of_blocking_code(tmp_path) -> None:
    with daemon(tmp_path, make_config()) as (address, process):
        client = open_blocking(attached(address))
        process.kill()
        threading.Timer(0.3, client.shutdown).start()
        begin = time.monotonic()
        with pytest.raises(EngineDeadError, match="was shut down"):
            client.call_utility("ping")
        assert time.monotonic() - begin < 60
