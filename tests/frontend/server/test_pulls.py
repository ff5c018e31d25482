"""/api/pull and /api/delete where they are allowed: over scripted engines, and with a real server;
the hub is a local one.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from huggingface_hub import constants
from quire.frontend.model_info.model_pull import CHUNK_BYTES
from quire.frontend.server.app import make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.model_slot import ModelSlot
from quire.frontend.server.models import Downloads, Models
from quire.frontend.server.pulls import MAX_DOWNLOADS, Pulls
from quire.frontend.server.state import ServerState
from quire.ipc.errors import ModelLoadError
from quire.tests.fake_hub import FakeHub, fake_hub, hub_checksum, use_hub
from quire.tests.frontend.server.conftest import running_server
from quire.tests.frontend.server.scripted import talk
from quire.tests.frontend.server.slots import make_slot, make_slots
from quire.tests.gguf_checkpoints import write_gguf
from quire.tests.tiny_models import save_tiny_model

KEYS = {"one": {"authorization": "Bearer one"}, "two": {"authorization": "Bearer two"}}
CONFIG = ServerConfig(allow_model_changes=True, api_key=list(KEYS))
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": os.urandom(4 * CHUNK_BYTES + 5),
}
DONE = {"status": "success"}
WAIT_S = 60.0  # for what happens within a second


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        hub.files["org/m"] = dict(FILES)
        hub.files["org/secret"] = dict(FILES)
        hub.gated.add("org/secret")
        hub.files["org/g"] = {f"m-{kind}.gguf": os.urandom(2000) for kind in ("Q8_0", "Q4_K_M")}
        yield hub


def made_models(failure: str | None = None) -> tuple[Models, list[str]]:
    """The model a, and downloads that become slots unless there is a failure."""

    def slot_of(name: str, num_models: int) -> ModelSlot:
        assert num_models == len(models.slots) + 1
        if failure is not None:
            raise ModelLoadError(failure)
        return make_slot(name, 100, CONFIG)

    models, log, _ = make_slots({"a": 100}, limit=200, config=CONFIG, downloads=Downloads(slot_of))
    return models, log


def spoken(
    speak: Callable[[httpx.AsyncClient, Models], Coroutine[Any, Any, Any]],
    failure: str | None = None,
) -> list[str]:
    models, log = made_models(failure)
    app: Any = make_app(ServerState(CONFIG, ""), models)
    talk(app, lambda client: speak(client, models), **KEYS["one"])
    return log


def lines_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson", answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


async def delete(client: httpx.AsyncClient, name: str, key: str = "one") -> httpx.Response:
    return await client.request("DELETE", "/api/delete", json={"model": name}, headers=KEYS[key])


def test_a_pull_streams_the_progress_of_each_file(hub: FakeHub, tmp_path: Path) -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        lines = lines_of(await client.post("/api/pull", json={"model": "hf.co/org/m:latest"}))
        assert lines[0] == {"status": "pulling manifest"}
        assert lines[-2:] == [{"status": "writing manifest"}, DONE]
        weights = [line for line in lines if line.get("total") == len(FILES["model.safetensors"])]
        checksum = hub_checksum(hub, "model.safetensors", FILES["model.safetensors"])
        assert weights[-1] == {
            "status": f"pulling {checksum[:12]}",
            "digest": f"sha256:{checksum}",
            "total": len(FILES["model.safetensors"]),
            "completed": len(FILES["model.safetensors"]),
        }
        names = [model["name"] for model in (await client.get("/api/tags")).json()["models"]]
        assert names == ["a", "org/m"]
        again = await client.post("/api/pull", json={"name": "org/m", "stream": False})
        assert again.json() == DONE
        chat = {"model": "hf.co/org/m", "prompt": "x", "stream": False}
        assert (await client.post("/api/generate", json=chat)).json()["response"] == "ab"
        assert 'model_name="org/m"' in (await client.get("/metrics")).text

    assert spoken(speak) == ["start org/m"]


def test_errors_of_the_hub_name_the_cause(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        async def refused(name: str) -> tuple[int, str]:
            answers = [
                await client.post("/api/pull", json={"model": name, "stream": streams})
                for streams in (True, False)
            ]
            assert answers[0].text == answers[1].text
            return answers[0].status_code, answers[0].json()["error"]

        for name, status, words in (
            ("llama3.2", 400, "Ollama's library"),
            ("llama3.2:1b", 400, "hf.co/ORG/NAME:Q4_K_M"),
            ("/etc/passwd", 400, "not a name"),
            ("../org/m", 400, "not a name"),
            ("org/absent", 404, "no repository 'org/absent'"),
            ("org/g:Q2_K", 404, "there are: Q4_K_M, Q8_0"),
            ("hf.co/org/g", 404, "org/g:Q4_K_M"),
        ):
            found = await refused(name)
            assert found[0] == status and words in found[1], found
        # the files are refused, after the list of them was not
        gated = await client.post("/api/pull", json={"model": "org/secret"})
        assert "gated" in lines_of(gated)[-1]["error"]
        plain = await client.post("/api/pull", json={"model": "org/secret", "stream": False})
        assert plain.status_code == 404 and "gated" in plain.json()["error"]
        hub.damaged.add("model.safetensors")
        assert (
            "damaged"
            in lines_of(await client.post("/api/pull", json={"model": "org/m"}))[-1]["error"]
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert (await refused("org/m"))[0] == 503
        assert "HF_HUB_OFFLINE" in (await refused("org/m"))[1]
        assert list(models.slots) == ["a"]

    spoken(speak)


def test_a_model_that_cannot_be_served_is_an_error(hub: FakeHub) -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        answer = await client.post("/api/pull", json={"model": "org/m"})
        assert "cannot be served: no such architecture." in lines_of(answer)[-1]["error"]
        assert list(models.slots) == ["a"]

    spoken(speak, "no such architecture")


def test_a_pulled_model_is_deleted_by_the_one_who_pulled_it(hub: FakeHub, tmp_path: Path) -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        for name in ("org/g:Q8_0", "org/g:Q4_K_M"):
            await client.post("/api/pull", json={"model": name, "stream": False})
            await client.post("/v1/completions", json={"model": name, "prompt": "x"})
        stranger = await delete(client, "org/g:Q8_0", "two")
        assert stranger.status_code == 403 and "another API key" in stranger.json()["error"]
        await models.acquire(models.slots["org/g:Q8_0"])
        busy = await delete(client, "org/g:Q8_0")
        assert busy.status_code == 409 and "'org/g:Q8_0' is in use" in busy.json()["error"]
        models.release(models.slots["org/g:Q8_0"])
        assert (await delete(client, "hf.co/org/g:Q8_0")).status_code == 200
        assert [path.name for path in tmp_path.rglob("*.gguf")] == ["m-Q4_K_M.gguf"]
        assert list(models.slots) == ["a", "org/g:Q4_K_M"]
        assert (await delete(client, "org/g:Q8_0")).status_code == 404
        given = await delete(client, "a")
        assert given.status_code == 403 and "at the server's start" in given.json()["error"]
        # a second key shares the model from its pull on
        await client.post("/api/pull", json={"model": "org/g:Q4_K_M"}, headers=KEYS["two"])
        assert (await delete(client, "org/g:Q4_K_M")).status_code == 403

    log = spoken(speak)
    assert log.index("end org/g:Q8_0") > log.index("start org/g:Q8_0")


def test_a_request_that_comes_during_the_deletion_finds_no_model(hub: FakeHub) -> None:
    async def run() -> None:
        models, _ = made_models()
        pulls = Pulls(models)
        assert [line async for line in pulls.pull("org/m", "")][-1] == DONE
        slot = models.slots["org/m"]
        await models.acquire(slot)
        models.release(slot)
        removal = asyncio.create_task(models.remove(slot))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="'org/m' does not exist"):
            await models.acquire(slot)
        await removal
        assert slot.phase == "unloaded" and list(models.slots) == ["a"]

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


def test_two_pulls_of_one_name_are_one_download_which_ends_with_the_last(
    hub: FakeHub, tmp_path: Path
) -> None:
    """What was received stays, and the next pull continues it."""
    hub.breaks_after = [CHUNK_BYTES + 1]
    hub.may_go_on.clear()

    async def run() -> None:
        models, _ = made_models()
        pulls = Pulls(models)
        both = [pulls.pull("org/m", tenant) for tenant in ("one", "two")]
        for generator in both:
            assert await anext(generator) == {"status": "pulling manifest"}
        await asyncio.to_thread(hub.has_broken.wait, WAIT_S)
        [download] = pulls._downloads.values()
        assert (download.num_waiting, download.tenants) == (2, {"one", "two"})
        with pytest.raises(ApiError, match="being downloaded"):
            await pulls.delete("org/m", "one")
        await both[0].aclose()
        assert not download.is_abandoned
        await both[1].aclose()
        assert download.is_abandoned
        hub.may_go_on.set()
        await until(lambda: not download.thread.is_alive())
        [partial] = tmp_path.rglob("*.incomplete")
        there = partial.stat().st_size
        assert CHUNK_BYTES <= there < len(FILES["model.safetensors"])
        assert list(models.slots) == ["a"]
        hub.asked.clear()
        assert [line async for line in pulls.pull("org/m", "one")][-1] == DONE
        assert ("GET", "model.safetensors", f"bytes={there}-") in hub.asked

    asyncio.run(run())


def test_downloads_are_limited_and_end_with_the_server(hub: FakeHub) -> None:
    for number in range(MAX_DOWNLOADS):
        hub.files[f"org/{number}"] = dict(FILES)
    hub.breaks_after = [1] * MAX_DOWNLOADS
    hub.may_go_on.clear()

    async def run() -> None:
        models, _ = made_models()
        pulls = Pulls(models)
        running = [pulls.pull(f"org/{number}", "") for number in range(MAX_DOWNLOADS)]
        for generator in running:
            await anext(generator)
        with pytest.raises(ApiError, match="the most") as refused:
            await anext(pulls.pull("org/m", ""))
        assert refused.value.status == 429
        threads = [download.thread for download in pulls._downloads.values()]
        await models.drain()
        for generator in running:
            with pytest.raises(ApiError, match="shutting down"):
                async for _ in generator:
                    pass
        with pytest.raises(ApiError, match="shutting down"):
            await anext(pulls.pull("org/m", ""))
        hub.may_go_on.set()
        await until(lambda: not any(thread.is_alive() for thread in threads))

    asyncio.run(run())


# ------------------------------------------------------------ a real server


Served = tuple[httpx.Client, FakeHub, Path]  # Path: the hub cache


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with the bundled model and `small`, from a local hub, where clients may pull."""
    folder = tmp_path_factory.mktemp("pulls")
    plain = save_tiny_model(folder / "plain", "qwen2", seed=0)
    write_gguf(folder / "m-Q8_0.gguf", plain, "Q8_0")
    with fake_hub() as hub, pytest.MonkeyPatch.context() as patch:
        hub.files["org/plain"] = {path.name: path.read_bytes() for path in plain.iterdir()}
        hub.files["org/gguf"] = {"m-Q8_0.gguf": (folder / "m-Q8_0.gguf").read_bytes()}
        hub.files["org/large"] = dict(FILES)
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HUB_CACHE", str(folder / "hub"))
        patch.setenv("HF_HUB_OFFLINE", "0")
        with running_server(
            *("bundled", "small=org/plain", "--allow-model-changes", "--num-threads", "1"),
            *("--log-level", "warning"),  # the hub client logs addresses
            *("--kv-cache-memory-bytes", str(2**25), "--memory-limit", "4GiB"),
        ) as client:
            yield client, hub, folder / "hub"


def test_a_pulled_model_answers_until_it_is_deleted(served: Served) -> None:
    client, _, cache = served
    name = "hf.co/org/gguf:Q8_0"
    absent = client.post("/api/show", json={"model": name})
    assert absent.status_code == 404
    with client.stream("POST", "/api/pull", json={"model": name}) as answer:
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert lines[-1] == DONE, lines
    body = {"model": name, "prompt": "x", "stream": False, "raw": True}
    answer = client.post("/api/generate", json=body | {"options": {"num_predict": 3}})
    assert answer.status_code == 200 and answer.json()["eval_count"] == 3, answer.text
    listed = {model["name"]: model for model in client.get("/api/tags").json()["models"]}
    assert list(listed) == ["bundled", "small", "org/gguf:Q8_0"]
    shown = client.post("/api/show", json={"model": name}).json()
    assert shown["details"] == listed["org/gguf:Q8_0"]["details"]
    assert shown["details"]["quantization_level"] == "Q8_0"
    assert client.request("DELETE", "/api/delete", json={"model": name}).status_code == 200
    assert not list(cache.rglob("*.gguf"))
    assert client.post("/api/generate", json=body).status_code == 404


def test_a_model_that_shares_its_files_is_not_deleted(served: Served) -> None:
    client, _, cache = served
    pulled = client.post("/api/pull", json={"model": "org/plain", "stream": False})
    assert pulled.json() == DONE
    refused = client.request("DELETE", "/api/delete", json={"model": "org/plain"})
    assert refused.status_code == 409 and "'small'" in refused.json()["error"]
    given = client.request("DELETE", "/api/delete", json={"model": "small"})
    assert given.status_code == 403
    assert list(cache.rglob("model.safetensors"))


def test_a_client_that_leaves_ends_its_download(served: Served) -> None:
    client, hub, cache = served
    hub.breaks_after = [CHUNK_BYTES + 1]
    hub.may_go_on.clear()
    with client.stream("POST", "/api/pull", json={"model": "org/large"}) as answer:
        lines = answer.iter_lines()  # kept: the stream is closed with it
        assert json.loads(next(lines)) == {"status": "pulling manifest"}
        assert hub.has_broken.wait(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    busy = {"model": "org/large"}
    while (code := client.request("DELETE", "/api/delete", json=busy).status_code) == 409:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert code == 404  # neither a model nor a download
    hub.asked.clear()
    hub.may_go_on.set()
    answer = client.post("/api/pull", json={"model": "org/large", "stream": False})
    assert answer.status_code == 400 and "cannot be served" in answer.json()["error"]
    ranges = [span for method, path, span in hub.asked if path == "model.safetensors" and span]
    assert ranges and not list(cache.rglob("*.incomplete"))
