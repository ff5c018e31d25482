"""Bodies with one field that is far too large: each error names the field, and the server answers
other requests in the meantime.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import running_server

# ratio of the longest gap to that of an idle server; without the limits it is 500 and more
MAX_RATIO = 100
HI = [{"role": "user", "content": "hi"}]
PART = {"type": "text", "text": "a"}
ITEM = {"role": "user", "content": "a"}


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


@pytest.mark.parametrize("name", CORPUS)
def test_a_large_field_is_refused_by_name(server, idle_gap_s, name) -> None:
    param, path, body = CORPUS[name]()
    body = json.dumps(body).encode()
    with polling_health(server) as took:
        answer = server.post(path, content=body)
    print(f"\n{name}: {max(took) / idle_gap_s:.1f} times the idle gap, {1000 * max(took):.0f} ms")
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    if path == "/api/chat":
        assert f"'{param}'" in error
    elif path.startswith("/v1/messages"):
        assert param in error["message"]
    else:
        assert error["param"] == param, error
    assert max(took) < MAX_RATIO * idle_gap_s


@pytest.mark.parametrize("name", ALLOWED)
def test_fields_within_the_limits_are_answered(server, idle_gap_s, name) -> None:
    path, body = ALLOWED[name]()
    with polling_health(server) as took:
        answer = server.post(path, json=body)
    print(f"\n{name}: {max(took) / idle_gap_s:.1f} times the idle gap, {1000 * max(took):.0f} ms")
    assert answer.status_code == 200, answer.text[:300]
    assert max(took) < MAX_RATIO * idle_gap_s


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
        assert server.process.wait(timeout=20) == 0  # draining may take 30 s
