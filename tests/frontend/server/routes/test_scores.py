"""/score, /rerank and their other paths, of a bi-encoder."""

from __future__ import annotations

import httpx2 as httpx
import numpy as np
import pytest

DOCUMENTS = ["bye", "hello", {"text": "the cat"}, "hello"]


def test_scores_are_cosines_of_embeddings(server: httpx.Client) -> None:
    texts = ["hello", "bye", "the cat"]
    data = server.post("/v1/embeddings", json={"input": texts}).json()["data"]
    query, *rows = (np.array(entry["embedding"]) for entry in data)
    for path, names in (
        ("/score", ("text_1", "text_2")),
        ("/v1/score", ("queries", "documents")),
        ("/score", ("data_1", "data_2")),
    ):
        answer = server.post(path, json={names[0]: texts[0], names[1]: texts[1:]}).json()
        scores = [entry["score"] for entry in answer["data"]]
        assert scores == pytest.approx([query @ row for row in rows], abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(
        len(server.post("/tokenize", json={"prompt": text}).json()["tokens"]) for text in texts
    )
    pairs = server.post("/score", json={"text_1": texts, "text_2": texts}).json()["data"]
    assert [entry["score"] for entry in pairs] == pytest.approx([1, 1, 1], abs=1e-6)


def test_documents_are_ranked_and_equal_ones_keep_their_order(server: httpx.Client) -> None:
    body = {"query": "hello", "documents": DOCUMENTS}
    answer = server.post("/rerank", json=body).json()
    order = [result["index"] for result in answer["results"]]
    assert order[:2] == [1, 3] and sorted(order) == [0, 1, 2, 3]
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["results"][0]["document"] == {"text": "hello"}
    best = server.post("/v1/rerank", json=body | {"top_n": 2, "return_documents": False}).json()
    assert best["results"] == [
        {"index": i, "relevance_score": score} for i, score in zip(order[:2], scores)
    ]
    cohere = server.post("/v2/rerank", json=body | {"top_n": 9, "max_tokens_per_doc": 5})
    assert cohere.headers["x-ignored-params"] == "max_tokens_per_doc"
    assert [result["index"] for result in cohere.json()["results"]] == order
    assert "document" not in cohere.json()["results"][0]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": "a", "queries": "a", "text_2": "b"}, "queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/rerank", {"query": "a", "documents": "b"}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b", {"title": "c"}]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "documents"),
    ],
)
def test_refusals_name_the_field(server: httpx.Client, path, body, param) -> None:
    answer = server.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
