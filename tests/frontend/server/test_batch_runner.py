"""Batches beside other requests: how many lines run, for which owner, and when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2 as httpx
from quire.frontend.batches.store import Store, StoredBatch
from quire.frontend.outputs import RequestOutput
from quire.frontend.server import batch_runner
from quire.frontend.server.app import App
from quire.frontend.server.batch_runner import LINE_ID, WEIGHT
from quire.frontend.server.serving import runner_of
from quire.tests.frontend.server.scripted import ScriptedEngine, scripted_app

URL = "/v1/completions"


class StoppedEngine(ScriptedEngine):
    """Answers a request when `release` says so. `running` has owner and weight of each."""

    def __init__(self) -> None:
        super().__init__(["a"])
        self.running: dict[str, tuple[str, float]] = {}
        self.most_lines = 0  # at once
        self._may_end: dict[str, asyncio.Event] = {}

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **more: Any
    ) -> AsyncIterator[RequestOutput]:
        self.running[request_id] = more["owner"], more["owner_weight"]
        self.most_lines = max(self.most_lines, len(self.lines))
        self._may_end[request_id] = asyncio.Event()
        try:
            await self._may_end[request_id].wait()
            async for output in super().generate(prompt, params, request_id):
                yield output
        finally:
            del self.running[request_id]

    @property
    def lines(self) -> list[str]:
        return [one for one in self.running if LINE_ID in one]

    def release(self, *names: str) -> None:
        for name in names:
            self._may_end[name].set()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def add_batch(store: Store, num_lines: int) -> StoredBatch:
    now = int(store.now())
    batch = StoredBatch(
        id=store.new_id("batch_"),
        owner="",
        kind="openai",
        urls=[URL],
        created_at=now,
        expires_at=now + 1000,
        output_file_id=store.new_id("file-"),
        error_file_id=store.new_id("file-"),
    )
    line = {"method": "POST", "url": URL, "body": {"prompt": "Once"}}
    lines = [json.dumps(line | {"custom_id": str(i)}) for i in range(num_lines)]
    store.add_batch(batch, lambda path: path.write_text("\n".join(lines)))
    return batch


def run_beside(app: App, test: Callable[[httpx.AsyncClient], Any]) -> None:
    """Run the batches of the app, and `test` with a client beside them."""

    async def run() -> None:
        batches = asyncio.create_task(runner_of(app, None).run())
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://scripted") as client:
            await test(client)
        batches.cancel()
        await asyncio.gather(batches, return_exceptions=True)

    asyncio.run(run())


def test_lines_give_way_to_other_requests(tmp_path: Path, monkeypatch: Any) -> None:
    """At first as many run as there may be; beside another request only one begins."""
    monkeypatch.setattr(batch_runner, "POLL_S", 0.01)
    engine = StoppedEngine()
    app = scripted_app(engine, batch_dir=str(tmp_path), max_batch_requests=4)
    batch = add_batch(app.state.files, 9)

    async def test(client: httpx.AsyncClient) -> None:
        await until(lambda: len(engine.lines) == 4)
        assert set(engine.running.values()) == {("batch:", WEIGHT)}
        live = asyncio.create_task(client.post(URL, json={"prompt": "Hi"}))
        await until(lambda: len(engine.running) == 5)
        (other,) = set(engine.running) - set(engine.lines)
        assert engine.running[other] == ("", 1.0)
        for num_left in (3, 2, 1):  # they end, and none begins
            engine.release(engine.lines[0])
            await until(lambda num_left=num_left: len(engine.lines) == num_left)
            await asyncio.sleep(0.1)
            assert len(engine.lines) == num_left
        before = engine.lines[0]
        engine.release(before)  # then one at a time begins
        await until(lambda: len(engine.lines) == 1 and engine.lines != [before])
        engine.release(other)
        assert (await live).status_code == 200
        await until(lambda: len(engine.lines) == 4)
        while engine.lines:
            engine.release(*engine.lines)
            await asyncio.sleep(0.02)
        await until(lambda: not list(app.state.files.unfinished()))

    run_beside(app, test)
    found = app.state.files.batch("", batch.id, "openai")
    assert found is not None and found.counts.completed == 9 and engine.most_lines == 4


def test_a_line_waits_while_the_server_is_full(tmp_path: Path, monkeypatch: Any) -> None:
    """A line that finds the queue full is no line that has failed."""
    monkeypatch.setattr(batch_runner, "POLL_S", 0.01)
    monkeypatch.setattr(batch_runner, "RETRY_S", 0.01)
    engine = StoppedEngine()
    limits = {"max_concurrent_requests": 1, "max_queued_requests": 1, "max_batch_requests": 4}
    app = scripted_app(engine, batch_dir=str(tmp_path), **limits)
    batch = add_batch(app.state.files, 6)

    async def test(client: httpx.AsyncClient) -> None:
        while list(app.state.files.unfinished()):
            engine.release(*engine.lines)
            await asyncio.sleep(0.02)

    run_beside(app, test)
    found = app.state.files.batch("", batch.id, "openai")
    assert found is not None and (found.counts.completed, found.counts.failed) == (6, 0)
