"""The routes of a server with several models, over scripted engines: which model answers, lists,
errors, keep_alive, metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx2 as httpx
import pytest
from quire.frontend.server.app import make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.models import Models
from quire.frontend.server.state import ServerState
from quire.tests.frontend.server.scripted import talk
from quire.tests.frontend.server.slots import bad_files, make_slots

COMPLETIONS = "/v1/completions"


def spoken(
    speak: Callable[[httpx.AsyncClient, Models], Coroutine[Any, Any, Any]],
    *,
    limit: int = 200,
    failing: str | None = None,
    **options: Any,
) -> tuple[Models, list[str]]:
    """Run `speak` with a client of a server with the models a, b and c, of which two fit."""
    config = ServerConfig(vllm_metrics=True)
    models, log, failures = make_slots(
        {"a": 100, "b": 100, "c": 100}, limit=limit, config=config, **options
    )
    if failing is not None:
        failures[failing] = [bad_files()]
    app: Any = make_app(ServerState(config, ""), models)
    talk(app, lambda client: speak(client, models))
    return models, log


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post(COMPLETIONS, json={"prompt": "x"} | body)


def test_the_model_of_the_body_answers() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        for body, name in (({"model": "b"}, "b"), ({}, "a"), ({"model": None}, "a")):
            answer = await complete(client, **body)
            assert answer.status_code == 200, answer.text
            assert (answer.json()["model"], answer.json()["choices"][0]["text"]) == (name, "ab")
        assert all(slot.num_users == 0 for slot in models.slots.values())

    _, log = spoken(speak)
    assert log == ["start b", "start a"]


def test_the_default_model_answers_for_unknown_ones_if_asked() -> None:
    config = ServerConfig(unknown_model="default")
    models, log, _ = make_slots(
        {"a": 100, "b": 100}, limit=200, config=config, unknown_is_default=True
    )

    async def speak(client: httpx.AsyncClient) -> list[str]:
        names = ("claude-9", "b", "claude-9")
        return [(await complete(client, model=name)).json()["model"] for name in names]

    app: Any = make_app(ServerState(config, ""), models)
    assert talk(app, speak) == ["a", "b", "a"] and log == ["start a", "start b"]


def test_a_stream_holds_its_model() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        body = {"model": "c", "prompt": "x", "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body) as answer:
            text = (await answer.aread()).decode()
        assert text.count('"model":"c"') == 2 and text.endswith("data: [DONE]\n\n")
        assert models.slots["c"].num_users == 0 and models.slots["c"].phase == "ready"

    spoken(speak)


def test_every_api_selects() -> None:
    message = [{"role": "user", "content": "x"}]

    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        for path, body in (
            ("/v1/chat/completions", {"messages": message}),
            ("/v1/responses", {"input": "x"}),
            ("/v1/messages", {"messages": message, "max_tokens": 4}),
            ("/api/chat", {"messages": message, "stream": False}),
            ("/api/generate", {"prompt": "x", "stream": False}),
            ("/api/show", {}),
            ("/tokenize", {"prompt": "x"}),
        ):
            name = "b:latest" if path.startswith("/api/") else "b"
            answer = await client.post(path, json=body | {"model": name})
            assert answer.status_code == 200, (path, answer.text)
            assert answer.json().get("model", name) == name
            unknown = await client.post(path, json=body | {"model": "x"})
            assert unknown.status_code == 404 and "'a', 'b', 'c'" in unknown.text

    _, log = spoken(speak)
    assert log == ["start b"]


def test_bad_bodies_load_nothing() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        for content in (b"{", b'{"model": 5, "prompt": "x"}', b"\xff", b"[" * 100_000):
            answer = await client.post(COMPLETIONS, content=content)
            assert answer.status_code == 400 and answer.json()["error"]["message"]
        answer = await client.post("/api/generate", json={"prompt": "x"})
        assert answer.status_code == 400 and "model" in answer.json()["error"]

    _, log = spoken(speak)
    assert log == []


def test_lists_cover_all_and_load_none() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        cards = (await client.get("/v1/models")).json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [
            (name, 512) for name in "abc"
        ]
        assert (await client.get("/v1/models/c")).json()["id"] == "c"
        assert (await client.get("/v1/models/x")).status_code == 404
        tags = (await client.get("/api/tags")).json()["models"]
        assert [tag["name"] for tag in tags] == ["a", "b", "c"] and tags[0]["details"]["family"]
        assert tags[0]["size"] == models.slots["a"].needs.weights_bytes
        assert (await client.get("/api/ps")).json() == {"models": []}
        assert not models.slots["a"].has_loaded
        await complete(client, model="b")
        [loaded] = (await client.get("/api/ps")).json()["models"]
        assert loaded["name"] == "b" and loaded["expires_at"].startswith("9999-")

    _, log = spoken(speak)
    assert log == ["start b"]


def test_ollamas_keep_alive() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        async def generate(**body: Any) -> dict[str, Any]:
            answer = await client.post("/api/generate", json={"stream": False} | body)
            assert "keep_alive" not in answer.headers.get("x-ignored-params", "")
            return answer.json()

        assert (await generate(model="a"))["done_reason"] == "load"
        await generate(model="a", prompt="x", keep_alive="1h")
        assert models.slots["a"].keep_alive_s == 3600.0
        [loaded] = (await client.get("/api/ps")).json()["models"]
        assert loaded["name"] == "a" and not loaded["expires_at"].startswith("9999-")
        assert (await generate(model="a", keep_alive=0))["done_reason"] == "unload"
        assert models.slots["a"].phase == "unloaded"
        assert (await generate(model="b", keep_alive="0s"))["done_reason"] == "unload"
        await generate(model="b", prompt="x", keep_alive=0)
        async with asyncio.timeout(60):
            while models.slots["b"].phase != "unloaded":
                await asyncio.sleep(0.001)
        assert "keep_alive" in (await generate(model="a", keep_alive="soon"))["error"]
        chat = await client.post("/api/chat", json={"model": "b", "keep_alive": 0})
        assert chat.json()["message"] == {"role": "assistant", "content": ""}

    _, log = spoken(speak, keep_alive_s=300.0)
    assert log == ["start a", "end a", "start b", "end b"]


def test_a_failed_load_is_told_and_tried_again() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        refused = await complete(client, model="b")
        assert refused.status_code == 503
        error = refused.json()["error"]
        assert error["code"] == "model_load_failed" and "its files are bad" in error["message"]
        assert (await complete(client, model="b")).status_code == 200

    spoken(speak, failing="b")


def test_health() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ping")).status_code == 200
        early = await client.get("/health/ready")
        assert early.status_code == 503 and early.json()["error"]["code"] == "model_loading"
        await complete(client)
        await complete(client, model="b")
        await models.unload(models.slots["a"])
        ready = await client.get("/health/ready")
        assert ready.json() == {
            "status": "ready",
            "model": "a",
            "models": {"a": "unloaded", "b": "ready", "c": "unloaded"},
        }
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert "version" in (await client.get("/version")).json()

    spoken(speak)


def test_views_of_one_engine_take_its_name() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        absent = await client.get("/v1/engine/state?model=b")
        assert absent.status_code == 503
        assert absent.json()["error"]["code"] == "model_not_loaded"
        # a page that polls gets the same without a status that its browser would log
        told = await client.get("/v1/engine/state?model=b&errors=body")
        assert told.status_code == 200 and told.json() == absent.json()
        await complete(client, model="b")
        for query, number in (("?model=b&limit=5", 1), ("?limit=5", 0)):
            listed = (await client.get("/v1/requests" + query)).json()["data"]
            assert len(listed) == number
        assert (await client.get("/v1/requests?model=x")).status_code == 404
        assert (await client.post("/sleep?model=b&level=1")).json()["error"]["code"] == (
            "admin_disabled"
        )

    spoken(speak)


def test_stored_responses_outlive_their_model() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        first = await client.post("/v1/responses", json={"model": "b", "input": "x"})
        await models.unload(models.slots["b"])
        found = await client.get(f"/v1/responses/{first.json()['id']}")
        assert found.json()["model"] == "b", found.text
        body = {"model": "c", "input": "y", "previous_response_id": first.json()["id"]}
        assert (await client.post("/v1/responses", json=body)).json()["model"] == "c"

    spoken(speak)


def test_metrics_have_the_models_name() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        for name in "abb":
            await complete(client, model=name)
        text = (await client.get("/metrics")).text
        lines = text.splitlines()
        for prefix in ("quire", "vllm"):
            family = f"{prefix}:request_success_total"
            counts = {
                name: line.rsplit(" ", 1)[1]
                for line in lines
                for name in "abc"
                if line.startswith(family + "{")
                and f'model_name="{name}"' in line
                and 'finished_reason="stop"' in line
            }
            assert counts == {"a": "1.0", "b": "2.0", "c": "0.0"}
        assert sum(line.startswith("# TYPE quire:num_requests_running ") for line in lines) == 1
        assert sum(line.startswith("quire:num_requests_running{") for line in lines) == 3
        assert sum(line.startswith("quire:engine_up{") for line in lines) == 3
        assert any(line.startswith("http_requests_total{") for line in lines)

    spoken(speak)


def test_a_client_that_leaves_while_its_model_waits() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        a = models.slots["a"]
        await models.acquire(a)
        with pytest.raises(httpx.TimeoutException):
            async with asyncio.timeout(0.05):
                await complete(client, model="b")
        models.release(a)

    with pytest.raises(TimeoutError):
        spoken(speak, limit=100)


def test_a_load_under_way_is_told() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        loading = asyncio.create_task(complete(client, model="b"))
        while models.slots["b"].phase != "loading":
            await asyncio.sleep(0)
        view = await client.get("/v1/engine/state?model=b")
        assert view.json()["error"]["code"] == "model_loading"
        await loading

    spoken(speak, delay_s=0.05)


def test_the_description_lists_the_routes_once() -> None:
    async def speak(client: httpx.AsyncClient, models: Models) -> None:
        paths = (await client.get("/openapi.json")).json()["paths"]
        described = paths["/v1/chat/completions"]["post"]
        assert described["summary"] == "OpenAI's chat completions" and described["requestBody"]
        assert {"/v1/models", "/api/show", "/metrics", "/health/ready"} <= paths.keys()
        assert "text/html" in (await client.get("/")).headers["content-type"]

    spoken(speak)
