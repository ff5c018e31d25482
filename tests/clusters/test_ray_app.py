"""The ingress and the replica of examples/ray_serve with the bundled model, without Ray."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quire.tests.clusters import fake_ray
from starlette.requests import Request

pytest.importorskip("pydantic")  # which Ray Serve brings
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "ray_serve"
NAMES = ("app", "routing", "streams")
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
STORY = {"prompt": "Once upon a time", "max_tokens": 150, "temperature": 0.8, "stream": True}
STORY |= {"seed": 5, "ignore_eos": True, "stream_options": {"include_usage": True}}


@dataclass
class Application:
    module: Any
    replica: Any
    ingress: Any
    handle: fake_ray.Handle
    runner: asyncio.Runner

    def call(self, path: str, body: Any, method: str = "POST") -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body), as Serve's proxy gets them."""
        return self.runner.run(asyncio.wait_for(self._call(path, body, method), 60))

    async def _call(self, path: str, body: Any, method: str) -> tuple[int, dict[str, str], bytes]:
        response = await self.ingress(request(path, body, method))
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, None, send)
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], headers, b"".join(one["body"] for one in sent[1:])

    def stream(self, path: str, body: Any, deaths: list[int] = []) -> tuple[str, list[Any]]:
        """The text of a stream whose answers die so, and its events."""
        self.handle.deaths = list(deaths)
        status, _, answer = self.call(path, body)
        assert status == 200
        lines = answer.decode().splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        choices = [choice for event in events for choice in event.get("choices", ())]
        texts = [one.get("text") or one.get("delta", {}).get("content") or "" for one in choices]
        return "".join(texts), events


def request(path: str, body: Any, method: str = "POST") -> Request:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", "host": "ray", "x-request-id": "of-client"}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    return Request(scope, receive)


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    fake_ray.install()
    sys.path.insert(0, str(FOLDER))
    try:
        module = importlib.import_module("app")
        with asyncio.Runner() as runner:
            replica = module.Replica.__new__(module.Replica)
            runner.run(replica.__init__(module.Arguments(engine_args={"max_num_seqs": 8})))
            handle = fake_ray.Handle(replica)
            yield Application(module, replica, module.Ingress(handle), handle, runner)
            runner.run(replica.check_health())
            runner.run(replica.__del__())
            module.Replica.__del__ = lambda self: None  # Serve calls it; the interpreter must not
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)
        fake_ray.remove()


def test_routes_and_refusals_are_the_servers(application: Application) -> None:
    status, headers, body = application.call("/v1/models", b"", "GET")
    assert status == 200 and json.loads(body)["data"][0]["id"] == "quire"
    assert headers["content-type"] == "application/json"
    status, headers, body = application.call(COMPLETIONS, {"prompt": "a", "temperature": -1})
    assert status == 400 and json.loads(body)["error"]["param"] == "temperature"
    assert headers["x-request-id"] == "of-client" and headers["content-length"] == str(len(body))
    assert application.call(COMPLETIONS, {"model": "other", "prompt": "a"})[0] == 404
    assert application.call(COMPLETIONS, b"{")[0] == 400
    assert application.call("/nowhere", b"", "GET")[0] == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, STORY),
        (COMPLETIONS, STORY | {"n": 2}),
        (CHAT, {k: v for k, v in STORY.items() if k != "prompt"}
         | {"messages": [{"role": "user", "content": "A story, please."}]}),
    ],
    ids=["completion", "two choices", "chat"],
)  # fmt: skip
def test_a_stream_goes_on_with_the_same_text(
    application: Application, path: str, body: dict[str, Any]
) -> None:
    whole, events = application.stream(path, body)
    assert len(whole) > 200
    ends = [choice["finish_reason"] for event in events for choice in event["choices"]]
    num_calls, num_resumed = application.handle.num_calls, application.ingress.num_resumed
    text, resumed = application.stream(path, body, deaths=[3, 0, 4])
    by_index = [["".join(texts(events, index)), "".join(texts(resumed, index))] for index in (0, 1)]
    assert all(one == other for one, other in by_index) and len(text) == len(whole)
    num_deaths = application.ingress.num_resumed - num_resumed
    assert num_deaths == application.handle.num_calls - num_calls - 1 >= 2
    assert len({event["id"] for event in resumed}) == 1
    assert resumed[-1]["usage"] == events[-1]["usage"] and not resumed[-1]["choices"]
    found = [choice["finish_reason"] for event in resumed for choice in event["choices"]]
    assert [end for end in found if end] == [end for end in ends if end]


def texts(events: list[Any], index: int) -> Iterator[str]:
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                yield choice.get("text") or choice.get("delta", {}).get("content") or ""


def test_without_a_seed_it_goes_on_too(application: Application) -> None:
    """The text differs from call to call, but not within one."""
    body = {name: value for name, value in STORY.items() if name != "seed"}
    text, events = application.stream(COMPLETIONS, body, deaths=[4])
    assert events[-1]["usage"]["completion_tokens"] == 150 and len(text) > 100
    seeded, _ = application.stream(COMPLETIONS, body)
    assert seeded != text


def test_what_cannot_be_resumed_ends_with_an_error(application: Application) -> None:
    for body in (STORY | {"logprobs": 1}, STORY | {"return_token_ids": True}):
        _, events = application.stream(COMPLETIONS, body, deaths=[3])
        assert events[-1]["error"]["code"] == "replica_gone"
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": "quire", "max_tokens": 30, "messages": messages, "stream": True}
    _, events = application.stream("/v1/messages", body, deaths=[2])
    assert events[-1]["error"]["code"] == "replica_gone"
    _, events = application.stream(COMPLETIONS, STORY, deaths=[2] * 5)
    assert events[-1]["error"]["code"] == "replica_gone"  # each replica dies of it


def test_an_answer_without_a_stream_is_asked_for_again(application: Application) -> None:
    body = {name: value for name, value in STORY.items() if not name.startswith("stream")}
    expected = json.loads(application.call(COMPLETIONS, body)[2])["choices"]
    application.handle.deaths = [0, 1]
    status, _, answer = application.call(COMPLETIONS, body)
    assert status == 200 and json.loads(answer)["choices"] == expected
    application.handle.deaths = [0] * 9
    status, headers, answer = application.call(COMPLETIONS, body)
    assert status == 503 and json.loads(answer)["error"]["code"] == "replica_gone"
    assert headers["retry-after"] == "1"
    application.handle.deaths = []


def test_a_client_that_leaves_aborts_its_request(application: Application) -> None:
    async def leave() -> None:
        body = STORY | {"max_tokens": 3000}
        call = ("", "POST", COMPLETIONS, "", [("content-type", "application/json")])
        answer = application.replica.answer(*call, json.dumps(body).encode())
        status, _ = await anext(answer)
        assert status == 200 and (await anext(answer)).startswith(b"data: {")
        assert application.replica.engine.has_unfinished_requests()
        await answer.aclose()
        assert await application.replica.engine.wait_until_idle(timeout_s=10)

    application.runner.run(leave())


def test_the_router_counts_requests(application: Application) -> None:
    router = application.module.PrefixRouter()
    router.initialize_state(slack=2)
    replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "abc"]
    pending = SimpleNamespace(args=["a conversation"])

    def choose(request: Any) -> list[str]:
        ranks = asyncio.run(router.choose_replicas(replicas, request))
        assert all(len(rank) == 1 for rank in ranks)
        return [rank[0].replica_id.unique_id for rank in ranks]

    first = choose(pending)[0]
    [chosen] = [one for one in replicas if one.replica_id.unique_id == first]
    for _ in range(3):
        assert choose(pending)[0] == first
        router.on_request_routed(pending, chosen.replica_id, None)
    assert choose(pending)[0] != first and choose(None)[0] != first
    router.on_request_completed(chosen.replica_id, "id")
    assert choose(pending)[0] == first
