"""/v1/embeddings, /pooling, /classify and Cohere's and Ollama's forms, of a model that also
generates.
"""

from __future__ import annotations

import base64
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

TEXTS = ["hello", "the cat sat on the mat", "x"]


def embed(server: httpx.Client, inputs: Any, **fields: Any) -> list[list[float]]:
    answer = server.post("/v1/embeddings", json={"input": inputs, **fields})
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


@pytest.fixture(scope="module")
def rows(server: httpx.Client) -> list[list[float]]:
    return embed(server, TEXTS)


def test_embeddings_in_openais_format(server: httpx.Client, rows) -> None:
    answer = server.post("/v1/embeddings", json={"input": TEXTS[0], "user": "me"}).json()
    assert answer["object"] == "list" and answer["id"].startswith("embd-")
    [entry] = answer["data"]
    assert entry == {"object": "embedding", "index": 0, "embedding": rows[0]}
    num_tokens = len(server.post("/tokenize", json={"prompt": TEXTS[0]}).json()["tokens"])
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == num_tokens
    assert abs(np.linalg.norm(rows[0]) - 1) < 1e-6
    assert [embed(server, [text])[0] for text in TEXTS] == rows


def test_token_ids_and_base64_are_the_same_numbers(server: httpx.Client, rows) -> None:
    ids = [server.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    assert embed(server, ids) == rows
    assert embed(server, ids[1]) == rows[1:2]
    for text, row in zip(embed(server, TEXTS, encoding_format="base64"), rows, strict=True):
        assert base64.b64decode(text) == np.array(row, "<f4").tobytes()


def test_a_conversation_in_place_of_texts(server: httpx.Client) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    asked = {"messages": messages, "add_generation_prompt": False}
    ids = server.post("/tokenize", json=asked).json()["tokens"]
    answer = server.post("/v1/embeddings", json={"messages": messages})
    assert [entry["embedding"] for entry in answer.json()["data"]] == embed(server, ids)
    for body, param in (
        ({"messages": messages, "input": "a"}, "messages"),
        ({}, "input"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
    ):
        refused = server.post("/v1/embeddings", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == (param or "messages[0].content[0].type")


def test_2048_texts_are_one_call(server: httpx.Client, rows) -> None:
    before = server.get("/v1/requests").json()["data"][0]["id"]
    many = embed(server, ["x"] * 2047 + ["hello"])
    assert many[0] == many[2046] == rows[2] and many[2047] == rows[0]
    log = server.get("/v1/requests").json()["data"]
    assert log[0]["num_texts"] == 2048 and log[1]["id"] == before


def test_other_forms_have_the_same_numbers(server: httpx.Client, rows) -> None:
    pooled = server.post("/pooling", json={"input": TEXTS}).json()
    assert [entry["data"] for entry in pooled["data"]] == rows
    by_token = server.post("/pooling", json={"input": TEXTS[1], "task": "token_embed"}).json()
    assert by_token["data"][0]["data"][-1] == rows[1]
    assert len(by_token["data"][0]["data"]) == by_token["usage"]["prompt_tokens"]
    raw = np.array(embed(server, TEXTS[0], use_activation=False)[0])
    assert np.abs(raw / np.linalg.norm(raw) - rows[0]).max() < 1e-6


def test_cohere(server: httpx.Client, rows) -> None:
    body = {"texts": TEXTS, "input_type": "search_query", "embedding_types": ["float", "base64"]}
    answer = server.post("/v2/embed", json=body | {"truncate": "END"}).json()
    assert answer["embeddings"]["float"] == rows and answer["texts"] == TEXTS
    assert base64.b64decode(answer["embeddings"]["base64"][0]) == np.array(rows[0], "<f4").tobytes()
    assert answer["meta"]["billed_units"]["input_tokens"] > 0
    long = server.post("/v2/embed", json={"texts": ["x" * 100_000]})
    assert long.status_code == 200  # cut by default
    long = server.post("/v2/embed", json={"texts": ["x" * 100_000], "truncate": "NONE"})
    assert long.status_code == 400 and long.json()["error"]["param"] == "texts"


def test_ollama(server: httpx.Client, rows) -> None:
    body = {"model": "bundled:latest", "input": TEXTS, "options": {"num_ctx": 5}}
    answer = server.post("/api/embed", json=body)
    assert answer.headers["x-ignored-params"] == "options.num_ctx"
    found = answer.json()
    assert found["embeddings"] == rows and found["model"] == "bundled:latest"
    assert found["prompt_eval_count"] > 3 and found["total_duration"] > 0
    one = server.post("/api/embeddings", json={"model": "bundled", "prompt": TEXTS[0]}).json()
    assert one == {"embedding": rows[0]}
    empty = server.post("/api/embed", json={"model": "bundled", "input": []}).json()
    assert empty["embeddings"] == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {"input": ["a", 1]}, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 8}, "dimensions"),
        ("/v1/embeddings", {"input": "a", "normalize": True}, "normalize"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "prompt_name"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "x" * 20_000}, "input"),
        ("/pooling", {"input": "a", "task": "score"}, "task"),
        ("/pooling", {"input": "a", "task": "classify"}, "model"),
        ("/classify", {"input": "a"}, "model"),
        ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types"),
        ("/v2/embed", {"input_type": "search_query"}, "texts"),
        ("/v2/embed", {"texts": ["a"], "images": ["x"]}, "images"),
    ],
)
def test_refusals_name_the_field(
    server: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_meters_count_texts(server: httpx.Client) -> None:
    def count() -> float:
        lines = server.get("/metrics").text.splitlines()
        [line] = [one for one in lines if one.startswith("quire:request_prompt_tokens_count")]
        return float(line.split()[-1])

    before = count()
    embed(server, TEXTS)
    assert count() == before + len(TEXTS)
