"""Servers with models that only pool, a cross-encoder and one with a row for each token; and texts
whose client leaves.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from quire import LLM
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import running_server
from quire.tests.tiny_encoders import save_tiny_encoder


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Iterator[httpx.Client]:
    directory = tmp_path_factory.mktemp("classifier")
    auto = "AutoModelForSequenceClassification"
    labels = {"id2label": {0: "relevant"}, "max_position_embeddings": 128}
    save_tiny_encoder(directory, "bert", auto, **labels)
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--num-threads", "1")
    with running_server(str(directory), *flags) as client:
        yield client


@pytest.fixture(scope="module")
def late_interaction(tmp_path_factory) -> Iterator[tuple[Path, httpx.Client]]:
    directory = tmp_path_factory.mktemp("late-interaction")
    save_tiny_encoder(directory, "bert", max_position_embeddings=128)
    flags = ("--pooler-config", '{"task": "token_embed"}', "--dtype", "float32")
    with running_server(str(directory), *flags, "--num-threads", "1") as client:
        yield directory, client


def test_scores_of_rows_by_token_are_maxsim(late_interaction: tuple[Path, httpx.Client]) -> None:
    directory, client = late_interaction
    query, documents = "a cat", ["the cat sat", "a dog", "the cat sat on the mat"]
    answer = client.post("/pooling", json={"input": [query, *documents]}).json()
    of_query, *rows = [np.array(entry["data"], np.float32) for entry in answer["data"]]
    assert len({len(some) for some in rows}) > 1  # one row for each token
    expected = [(of_query @ some.T).max(axis=1).sum(dtype=np.float64) for some in rows]
    body = {"text_1": query, "text_2": documents}
    scores = [entry["score"] for entry in client.post("/score", json=body).json()["data"]]
    assert scores == pytest.approx(expected, abs=1e-5)
    ranked = client.post("/rerank", json={"query": query, "documents": documents}).json()
    assert [result["index"] for result in ranked["results"]] == sorted(
        range(3), key=lambda i: -scores[i]
    )
    settings: dict[str, Any] = dict(dtype="float32", num_threads=1, engine="inproc")
    with LLM(str(directory), pooler_config={"task": "token_embed"}, **settings) as llm:
        found = llm.score(query, documents, use_tqdm=False)
    assert [output.outputs.score for output in found] == scores


def test_generation_is_refused_by_name(classifier: httpx.Client) -> None:
    messages = [{"role": "user", "content": "a"}]
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"model": "tiny", "messages": messages, "max_tokens": 5}),
        ("/api/chat", {"model": "tiny", "messages": messages}),
        ("/api/generate", {"model": "tiny", "prompt": "a"}),
    ):
        answer = classifier.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert "The model 'tiny' generates no text; it can classify" in answer.text
    answer = classifier.post("/v1/embeddings", json={"input": "a"}).json()["error"]
    assert answer["param"] == "model" and "cannot embed; it can classify" in answer["message"]
    shown = classifier.post("/api/show", json={"model": "tiny"}).json()
    assert shown["capabilities"] == ["embedding"]
    assert classifier.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_classes_scores_and_ranks_are_the_same_numbers(classifier: httpx.Client) -> None:
    documents = ["the cat", "a dog", "the cat", "x " * 500]
    body = {"text_1": "a cat", "text_2": documents[:3]}
    scores = [entry["score"] for entry in classifier.post("/score", json=body).json()["data"]]
    assert scores[0] == scores[2] != scores[1] and all(0 < score < 1 for score in scores)
    ranked = classifier.post("/rerank", json={"query": "a cat", "documents": documents[:3]}).json()
    order = [(result["index"], result["relevance_score"]) for result in ranked["results"]]
    assert order == sorted(enumerate(scores), key=lambda entry: -entry[1])
    answer = classifier.post("/classify", json={"input": ["a cat", "a dog"]}).json()
    for entry in answer["data"]:
        assert entry["label"] == "relevant" and entry["num_classes"] == len(entry["probs"]) == 1
    too_long = classifier.post("/rerank", json={"query": "a", "documents": documents})
    assert too_long.status_code == 400 and too_long.json()["error"]["param"] == "documents"
    cut = {"query": "a", "documents": documents, "truncate_prompt_tokens": -1}
    assert classifier.post("/rerank", json=cut).status_code == 200


def test_texts_of_a_client_that_leaves_are_aborted(server: httpx.Client) -> None:
    texts = ["the cat sat on the mat and " * 40] * 2000
    body = {"input": [f"{i} {text}" for i, text in enumerate(texts)], "truncate_prompt_tokens": -1}
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.base_url.port)) as client:
        head = b"POST /v1/embeddings HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(raw)
        client.sendall(head + raw)
        wait_until(lambda: running(server) > 0)
    wait_until(lambda: running(server) == 0)
    log = server.get("/v1/requests").json()["data"][0]
    assert log["num_texts"] == 2000 and log["finish_reason"] == "abort"


def running(server: httpx.Client) -> float:
    lines = server.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith(("quire:num_requests_running{", "quire:num_requests_waiting{"))
    )
