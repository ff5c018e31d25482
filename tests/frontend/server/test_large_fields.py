"""Bodies with one field that is far too large: each error names the field, and the server answers
other requests in the meantime.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import msgspec
import psutil
import pytest
from msgspec import inspect
from quire.frontend.server.apis.responses_items import MAX_CONVERSATION, Item, ItemPart
from quire.frontend.server.app import App, all_routes, make_app
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.bodies import LIMITS, FieldLimit
from quire.frontend.server.response_store import Stored
from quire.frontend.server.routes import cohere, ollama_embed, scores
from quire.frontend.server.routes import pooling as pooling_routes
from quire.frontend.server.state import ServerState
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import running_server
from quire.tests.frontend.server.scripted import TOOL_TEMPLATE, ScriptedEngine

# ratio of the longest gap to that of an idle server; without the limits it is 500 and more
MAX_RATIO = 100
JSON = {"Content-Type": "application/json"}
HI = [{"role": "user", "content": "hi"}]
PART = {"type": "text", "text": "a"}
ITEM = {"role": "user", "content": "a"}
LARGE_IMAGE = {
    "type": "image_url",
    "image_url": {"url": "data:image/png;base64," + "A" * 30_000_000},
}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "a", "max_tokens": 1, **fields}


# name -> (the field that the error names, path, body). Created for each request, since together
# they take some hundred megabytes.
CORPUS = {
    "bad_words, many": lambda: ("bad_words", *completion(bad_words=["ab" * 500] * 1000)),
    "bad_words, long": lambda: ("bad_words", *completion(bad_words=["x" * 10**6])),
    "stop_token_ids": lambda: ("stop_token_ids", *completion(stop_token_ids=[1] * 600_000)),
    "allowed_token_ids": lambda: (
        "allowed_token_ids",
        *completion(allowed_token_ids=[1] * 600_000),
    ),
    "logit_bias": lambda: ("logit_bias", *completion(logit_bias={str(i): 1 for i in range(10**5)})),
    "stop": lambda: ("stop", *completion(stop=["x" * 10**6] * 4)),
    "prompt, texts": lambda: ("prompt", *completion(prompt=["a"] * 1_100_000)),
    "prompt, ids": lambda: ("prompt", *completion(prompt=[1] * 3_000_000)),
    "prompt, long": lambda: ("prompt", *completion(prompt="word " * 5_000_000)),
    "guided_choice": lambda: ("guided_choice", *completion(guided_choice=["ab"] * 300_000)),
    "guided_json": lambda: ("guided_json", *completion(guided_json={"enum": ["ab"] * 300_000})),
    "response_format": lambda: (
        "response_format",
        *completion(response_format={"x": [1] * 600_000}),
    ),
    "metadata": lambda: ("metadata", *completion(metadata={str(i): "" for i in range(10**5)})),
    "unknown fields": lambda: (None, *completion(**{f"x{i}": 1 for i in range(300_000)})),
    "text parts": lambda: (
        "messages",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [PART] * 100_000}]},
    ),
    "messages": lambda: ("messages", "/v1/chat/completions", {"messages": HI * 100_000}),
    "tools": lambda: ("tools", "/v1/chat/completions", {"messages": HI, "tools": [{}] * 300_000}),
    "documents": lambda: (
        "documents",
        "/v1/chat/completions",
        {"messages": HI, "documents": [{"text": "a"}] * 300_000},
    ),
    "responses items": lambda: ("input", "/v1/responses", {"input": [ITEM] * 100_000}),
    "responses include": lambda: (
        "include",
        "/v1/responses",
        {"input": "a", "include": [""] * 300_000},
    ),
    "anthropic": lambda: (
        "messages",
        "/v1/messages",
        {"max_tokens": 1, "messages": [ITEM] * 100_000},
    ),
    "ollama": lambda: ("messages", "/api/chat", {"model": "bundled", "messages": [ITEM] * 100_000}),
    "ollama, images": lambda: (
        "messages",
        "/api/chat",
        {
            "model": "bundled",
            "messages": [{"role": "user", "content": "a", "images": ["aGk="] * 100_000}],
        },
    ),
    # of a model that reads text only
    "one image": lambda: (
        "messages[0].content[0].type",
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [LARGE_IMAGE]}]},
    ),
    "tokenize": lambda: ("prompt", "/tokenize", {"prompt": "word " * 1_000_000}),
    "tokenize, messages": lambda: (
        "messages",
        "/tokenize",
        {"messages": [{"role": "user", "content": "word " * 1_000_000}]},
    ),
    "count tokens": lambda: (
        "messages",
        "/v1/messages/count_tokens",
        {"messages": [{"role": "user", "content": "word " * 1_000_000}]},
    ),
    "detokenize": lambda: ("tokens", "/detokenize", {"tokens": [1] * 3_000_000}),
}
# Just within the limits.
ALLOWED = {
    "stop_token_ids": lambda: completion(stop_token_ids=[1] * 9_999),
    "allowed_token_ids": lambda: completion(allowed_token_ids=[1, 2] * 200_000),
    "logit_bias": lambda: completion(logit_bias={str(i % 2048): 1 for i in range(9_999)}),
    "bad_words": lambda: completion(bad_words=[f"w{i}" for i in range(1000)]),
    "prompt": lambda: completion(prompt="a " + "x, " * 600),
    "text parts": lambda: (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [PART] * 2_000}], "truncate_prompt_tokens": 100},
    ),
    "detokenize": lambda: ("/detokenize", {"tokens": [5] * 500_000}),
    "tokenize": lambda: ("/tokenize", {"prompt": "word " * 100_000, "return_token_strs": True}),
    "unknown field": lambda: completion(notes="a, b, " * 5_000),
}


@contextmanager
def polling_health(server: httpx.Client) -> Iterator[list[float]]:
    """Yield the seconds of each answer of /health, requested one after the other."""
    took, is_over = [], threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.base_url, timeout=120) as client:
            while not is_over.is_set():
                began = time.perf_counter()
                assert client.get("/health").status_code == 200
                took.append(time.perf_counter() - began)
                time.sleep(0.002)

    def wait_for_more() -> None:
        seen = len(took)
        wait_until(lambda: len(took) > seen, timeout_s=60)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        wait_for_more()
        took.clear()
        yield took
        wait_for_more()
    finally:
        is_over.set()
        thread.join()


@pytest.fixture(scope="module")
def idle_gap_s(server: httpx.Client) -> float:
    """Return the longest gap while the server is otherwise idle."""
    with polling_health(server) as took:
        wait_until(lambda: len(took) >= 300)
    return max(took)


def ask_beside_others(
    server: httpx.Client, path: str, body: bytes, idle_gap_s: float
) -> httpx.Response:
    """Return the answer, during which the server answered others. Of a few attempts the least
    disturbed counts, since other programs delay answers, too.
    """
    for _ in range(4):
        with polling_health(server) as took:
            answer = server.post(path, content=body, headers=JSON)
        print(f"\n{max(took) / idle_gap_s:.1f} times the idle gap, {1000 * max(took):.0f} ms")
        if max(took) < MAX_RATIO * idle_gap_s:
            return answer
    raise AssertionError("others waited each time")


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize("name", CORPUS)
def test_a_large_field_is_refused_by_name(server, idle_gap_s, name) -> None:
    param, path, body = CORPUS[name]()
    answer = ask_beside_others(server, path, json.dumps(body).encode(), idle_gap_s)
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    if path == "/api/chat":
        assert f"'{param}'" in error
    elif path.startswith("/v1/messages"):
        assert param in error["message"]
    else:
        assert error["param"] == param, error


@pytest.mark.parametrize("name", ALLOWED)
def test_fields_within_the_limits_are_answered(server, idle_gap_s, name) -> None:
    path, body = ALLOWED[name]()
    answer = ask_beside_others(server, path, json.dumps(body).encode(), idle_gap_s)
    assert answer.status_code == 200, answer.text[:300]


def abandon(port: int, text: str) -> None:
    """Request the tokens of a text with the key "a", and disconnect."""
    body = json.dumps({"prompt": text}).encode()
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            connection.sendall(head.encode() + body)
        except OSError:
            pass  # refused before it was sent


@pytest.mark.slow
def test_abandoned_texts_take_no_memory_or_turns_and_do_not_delay_the_end() -> None:
    """Six texts of 30 MB, and six of the maximum length."""
    with running_server("--api-key", "a", "--api-key", "b", "--no-access-log") as server:
        process = psutil.Process(server.process.pid)

        def took_s() -> float:
            began = time.perf_counter()
            answer = server.post(
                "/tokenize",
                json={"prompt": "word " * 40_000},
                headers={"Authorization": "Bearer b"},
            )
            assert answer.status_code == 200, answer.text
            return time.perf_counter() - began

        peace_s, memory = max(took_s() for _ in range(3)), process.memory_info().rss
        for text in ["word " * 6_000_000] * 6 + ["word " * 200_000] * 6:
            abandon(server.base_url.port, text)
        war_s, most_memory = took_s(), process.memory_info().rss
        print(
            f"\n{1000 * peace_s:.0f} ms for the other key in peace, {1000 * war_s:.0f} ms beside "
            f"twelve abandoned texts; {(most_memory - memory) / 2**20:.0f} MiB more"
        )
        assert war_s < 40 * peace_s
        assert most_memory - memory < 2**30
        abandon(server.base_url.port, "word " * 200_000)
        server.process.terminate()
        assert server.process.wait(timeout=60) == 0  # draining may take 30 s


# ------------------------------------------------------------ every list field, by its type

# The values of fields with these names; others have that of their type.
VALUES = {"role": "user", "type": "text", "model": "bundled", "content": "a", "text": "a"} | {
    "input": "a",
    "prompt": "a",
    "messages": [{"role": "user", "content": "a"}],
}
FUNCTION = {"name": "f@", "description": "a", "parameters": {"type": "object"}}
# Elements that a type alone does not give. "@" becomes the element's number.
ELEMENTS: dict[str, list[Any]] = {
    "Item": [
        {"type": "message", "role": "user", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "item_reference", "id": "stored_@"},
        {"type": "item_reference", "id": "stored_1"},
        {"type": "item_reference", "id": "absent_@"},
    ],
    "ResponsesTool": [{"type": "function", **FUNCTION}],
    "Tool": [{"type": "function", "function": FUNCTION}],
    "AnthropicTool": [{"name": "f@", "input_schema": {"type": "object"}}],
}
NUM_STORED = 64  # responses in the full store
MOST = MAX_CONVERSATION  # of the store for one conversation
MOST_BYTES = ServerConfig().max_body_bytes
MAX_GAP_S = 0.25  # of the answers of /health, in seconds of this process


def annotated(info: inspect.Metadata) -> inspect.Type:
    """The type that the value is checked as."""
    kind = (info.extra or {}).get("sent_as")
    return info.type if kind is None else inspect.type_info(kind)


def sample(info: inspect.Type, name: str = "") -> Any:
    """A small valid value of the type."""
    if isinstance(info, inspect.Metadata):
        return sample(annotated(info), name)
    if isinstance(info, inspect.UnionType):
        members = [kind for kind in info.types if not isinstance(kind, inspect.NoneType)]
        return sample(members[0], name)
    if isinstance(info, inspect.StructType):
        if known := ELEMENTS.get(info.cls.__name__):
            return known[0]
        tag = {info.tag_field: info.tag} if info.tag_field else {}
        values = {
            f.encode_name: sample(f.type, f.encode_name)
            for f in info.fields
            if f.required or f.encode_name in VALUES
        }
        return tag | {name: value for name, value in values.items() if value != {}}
    if isinstance(info, inspect.IntType | inspect.FloatType):
        return 1
    if isinstance(info, inspect.BoolType):
        return True
    if isinstance(info, inspect.ListType):
        return [sample(info.item_type)]
    if isinstance(info, inspect.DictType):
        return {}
    if isinstance(info, inspect.LiteralType):
        return info.values[0]
    return VALUES.get(name, "a")


def lists_in(
    info: inspect.Type, name: str, seen: tuple[type, ...] = ()
) -> Iterator[tuple[str, Callable[[int], Any], Any]]:
    """The path of each list and object in the type, what makes a value of the type in which it has
    the given number of elements, and one element.
    """
    if isinstance(info, inspect.Metadata):
        yield from lists_in(annotated(info), name, seen)
    elif isinstance(info, inspect.UnionType):
        for member in info.types:
            yield from lists_in(member, name, seen)
    elif isinstance(info, inspect.StructType) and info.cls not in seen:
        for field in info.fields:
            key = field.encode_name
            for path, make, element in lists_in(field.type, key, (*seen, info.cls)):
                yield (
                    f"{name}.{path}" if name else path,
                    lambda n, make=make, key=key: sample(info) | {key: make(n)},
                    element,
                )
    elif isinstance(info, inspect.ListType):
        item = info.item_type
        item = annotated(item) if isinstance(item, inspect.Metadata) else item
        of_type = getattr(item, "cls", type(None)).__name__
        for element in ELEMENTS.get(of_type, [sample(info.item_type)]):
            yield f"{name}[]", lambda n, element=element: many(element, n), element
        for path, make, element in lists_in(info.item_type, f"{name}[]", seen):
            yield path, lambda n, make=make: [make(n)], element
    elif isinstance(info, inspect.DictType):
        element = sample(info.value_type)
        yield f"{name}{{}}", lambda n: {f"key {i}": element for i in range(n)}, element


def many(element: Any, number: int) -> list[Any]:
    text = json.dumps(element)
    return [
        json.loads(text.replace("@", str(i))) if "@" in text else element for i in range(number)
    ]


def bodies_at_their_limits(body_type: type[msgspec.Struct]) -> dict[str, bytes]:
    """By the path of each list in the type, with a number where there are several elements."""
    found = {}
    for path, make, element in lists_in(inspect.type_info(body_type), ""):
        name = re.split(r"[.\[{]", path)[0]
        own = getattr(body_type, "field_limits", {})
        limit = own.get(name) or LIMITS.get(name, FieldLimit())
        text = json.dumps(element)
        num_values = 1 + sum(map(text.count, ",[{"))
        most_bytes = min(limit.max_bytes or MOST_BYTES, MOST_BYTES)
        number = min(limit.max_values // num_values, most_bytes // (len(text) + 14)) - 20
        found[f"{path} {len(found)}"] = json.dumps(make(number)).encode()
    return found


def fill(state: ServerState) -> None:
    """Stores responses whose items have the ids stored_0, stored_1, ..., in equal parts."""
    num_items = MAX_CONVERSATION // 4 // NUM_STORED
    items = [Item(type="message", id=f"of_{i}", role="user", content="") for i in range(MOST // 2)]
    state.responses.put("", Stored({"id": "conv_full", "output": []}, items, []))
    for i in range(NUM_STORED):
        items = [
            Item(
                type="message",
                id=f"stored_{i * num_items + j}",
                role="user",
                content=[ItemPart(type="input_text", text="a")],
            )
            for j in range(num_items)
        ]
        state.responses.put("", Stored({"id": f"resp_{i}", "output": []}, items, []))


async def longest_gap_s(app: App, path: str, body: bytes) -> tuple[float, httpx.Response]:
    """The longest time between two answers of /health while the app answers the request, in
    seconds of this process, which other processes do not change.
    """
    gaps: list[float] = []

    async def poll(client: httpx.AsyncClient) -> None:
        last = time.process_time()
        while True:
            assert (await client.get("/health")).status_code == 200
            now = time.process_time()
            gaps.append(now - last)
            last = now
            await asyncio.sleep(0.002)

    gc.collect()
    gc.freeze()  # a collection would go through what all other tests have left in this process
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://scripted") as client:
        polling = asyncio.create_task(poll(client))
        await asyncio.sleep(0.01)
        answer = await client.post(path, content=body)
        await asyncio.sleep(0.01)
        polling.cancel()
    gc.unfreeze()
    return max(gaps), answer


@pytest.fixture(scope="module")
def full_state() -> ServerState:
    """The state of a server with a scripted engine, whose store of responses is full."""
    config = ServerConfig(chat_template=TOOL_TEMPLATE)
    state = ServerState(config, "bundled", ScriptedEngine(["a"]))
    fill(state)
    return state


def body_types(state: ServerState) -> dict[str, type[msgspec.Struct]]:
    """The types of the bodies by the paths of the routes."""
    return {route.path: route.body for route in all_routes(state) if route.body is not None}


def longest_gaps_s(state: ServerState, paths: Container[str]) -> dict[str, float]:
    """The longest gap for every list in the bodies of these routes."""
    app, gaps = make_app(state), {}
    for path, body_type in body_types(state).items():
        if path in paths:
            for name, body in bodies_at_their_limits(body_type).items():
                url = path.replace("{conversation_id}", "conv_full")
                gap_s, answer = asyncio.run(longest_gap_s(app, url, body))
                print(f"{1000 * gap_s:.0f} ms {path} {name} {len(body)} {answer.text[:200]}")
                assert answer.status_code in (200, 400), answer.text[:200]
                gaps[f"{path} {name}"] = gap_s
    return gaps


def check_gaps(gaps: dict[str, float], state: ServerState) -> None:
    too_long = {name: gap_s for name, gap_s in gaps.items() if gap_s > MAX_GAP_S}
    assert gaps and not too_long, too_long
    assert len(state.responses) >= NUM_STORED  # no request has changed the store


@pytest.mark.slow
def test_no_list_of_any_api_stops_the_server(full_state, server, idle_gap_s) -> None:
    """The scripted engine pools nothing: those APIs are those of a real server."""
    pooling = {
        route.path
        for family in (pooling_routes, scores, cohere, ollama_embed)
        for route in family.routes(full_state)
    }
    of_types = body_types(full_state)
    check_gaps(longest_gaps_s(full_state, of_types.keys() - pooling), full_state)
    for path in pooling & of_types.keys():
        for name, body in bodies_at_their_limits(of_types[path]).items():
            # a gap that another process caused does not repeat
            for _ in range(3):
                with polling_health(server) as took:
                    answer = server.post(path, content=body, headers=JSON)
                print(f"{1000 * max(took):.0f} ms {path} {name} {len(body)} {answer.text[:200]}")
                assert answer.status_code in (200, 400), answer.text[:200]
                if is_short := max(took) < MAX_GAP_S + 5 * idle_gap_s:
                    break
            assert is_short, (path, name)


@pytest.mark.slow
def test_the_longest_conversation_does_not_stop_the_server(full_state: ServerState) -> None:
    """A longer one is refused under the name of the field."""
    items = [Item(type="message", id=f"long_{i}", role="user", content="") for i in range(MOST)]
    full_state.responses.put("", Stored({"id": "resp_longest", "output": []}, items[2:], []))
    full_state.responses.put("", Stored({"id": "resp_longer", "output": []}, items, []))
    app = make_app(full_state)
    for name, code in (
        ("resp_longest", "context_length_exceeded"),
        ("resp_longer", "array_above_max_length"),
    ):
        body = json.dumps({"previous_response_id": name, "input": "a"}).encode()
        gap_s, answer = asyncio.run(longest_gap_s(app, "/v1/responses", body))
        assert answer.json()["error"]["code"] == code, answer.text
        assert gap_s < MAX_GAP_S
    assert answer.json()["error"]["param"] == "previous_response_id"
    url = "/v1/conversations/conv_full/items"
    body = json.dumps({"items": [{"role": "user", "content": [PART] * 9_000}]}).encode()
    answers = [asyncio.run(longest_gap_s(app, url, body))[1] for _ in range(4)]
    assert answers[-1].status_code == 400 and answers[-1].json()["error"]["param"] == "items"
