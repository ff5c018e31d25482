"""/v1/embeddings, /score and /rerank: bodies are validated, then refused with a sentence."""

from typing import Any

import httpx2 as httpx
import pytest

GOOD = {
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64"},
    "/score": {"text_1": "a", "text_2": ["b"]},
    "/v1/score": {"text_1": "a", "text_2": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": [{"text": "b"}], "top_n": 1},
}


@pytest.mark.parametrize(("path", "body"), GOOD.items())
def test_a_valid_body_is_refused_with_a_sentence(
    server: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    answer = server.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "unsupported_value",
        "model",
    ) and "generates text" in error["message"]
    assert (
        server.post(path, json=body | {"model": "other"}).json()["error"]["code"]
        == "model_not_found"
    )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/embeddings", {}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "binary"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
def test_an_invalid_body_gets_its_own_error(
    server: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = server.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param) and answer.json()[
        "error"
    ]["code"] != "unsupported_value"
