"""Random schemas through `response_format` on the bundled model: the JSON is finished and valid,
and has no more whitespace than JSON usually has.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest
from quire.ipc.params import StructuredOutputsParams
from quire.tests.frontend.server.conftest import running_server
from quire.tests.structured.generator import is_bounded, problem_with, random_schema

MAX_TOKENS = 512
STRING = r'"(?:[^"\\]|\\.)*"?'


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    with running_server() as client:
        yield client


def schemas() -> Iterator[dict[str, Any]]:
    for seed in itertools.count():
        yield random_schema(random.Random(seed), 3)


def answer(server: httpx.Client, schema: dict[str, Any], **fields: Any) -> tuple[str, str]:
    """The content and the finish reason."""
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    body = {
        "messages": [{"role": "user", "content": "Give me an example."}],
        "max_tokens": MAX_TOKENS,
        "seed": 0,
        "response_format": format,
        **fields,
    }
    done = server.post("/v1/chat/completions", json=body)
    assert done.status_code == 200, done.text
    (choice,) = done.json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def num_finished_and_valid(server: httpx.Client, count: int) -> int:
    """Of `count` schemas whose values are bounded."""
    wanted = list(itertools.islice(filter(is_bounded, schemas()), count))
    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda schema: answer(server, schema), wanted))
    valid = 0
    for schema, (text, reason) in zip(wanted, answers, strict=True):
        if reason == "stop":
            problem = problem_with(text, StructuredOutputsParams(json=schema))
            assert problem is None, (problem, text, schema)
            valid += 1
    print(f"\n{valid} of {count} answers finished and valid")
    return valid


def longest_whitespace(text: str) -> str:
    """Between two JSON tokens, in text that may be cut off."""
    found = re.findall(r"\s+", re.sub(STRING, "s", text))
    return max(found, key=len, default="")


def test_twenty_schemas(server) -> None:
    assert num_finished_and_valid(server, 20) >= 19


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_schemas(server) -> None:
    assert num_finished_and_valid(server, 200) >= 190


def test_whitespace_stays_within_its_bound(server) -> None:
    """With schemas of all kinds, including unbounded ones."""
    with ThreadPoolExecutor(16) as threads:
        wanted = itertools.islice(schemas(), 16)
        texts = [
            text for text, _ in threads.map(lambda s: answer(server, s, max_tokens=96), wanted)
        ]
    runs = [longest_whitespace(text) for text in texts]
    assert any(runs) and [run for run in runs if not re.fullmatch(r" |\n[ \t]{0,20}|", run)] == []
    compact, _ = answer(server, {"type": "object"}, disable_any_whitespace=True, max_tokens=96)
    assert longest_whitespace(compact) == ""
