"""The load of experts over HTTP, from a real server with a tiny mixture of experts."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx2 as httpx
import pytest
from quire.core.observation import imbalance, unused
from quire.tests.frontend.server.conftest import running_server
from quire.tests.tiny_models import save_tiny_model

LAYERS, EXPERTS, PER_TOKEN = [1], 8, 3  # of three layers, only this one has experts
PROMPT, NUM_TOKENS = [5, 9, 250, 17, 100], 12


@pytest.fixture(scope="module")
def moe(tmp_path_factory) -> Iterator[httpx.Client]:
    model = save_tiny_model(tmp_path_factory.mktemp("moe"), "qwen3_moe")
    with running_server("--model", str(model), "--admin") as client:
        yield client


def complete(client: httpx.Client) -> None:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


def gauges(client: httpx.Client) -> dict[tuple[str, str], float]:
    lines = re.findall(
        r'^quire:(expert_\w+){layer="(\d+)"} (\S+)$', client.get("/metrics").text, re.M
    )
    return {(name, layer): float(value) for name, layer, value in lines}


def test_the_route_and_the_gauges_have_what_was_computed(moe: httpx.Client) -> None:
    before = moe.get("/v1/engine/experts").json()
    assert before == {"layers": LAYERS, "tokens": [[0] * EXPERTS]}
    assert gauges(moe) == {("expert_load_imbalance", "1"): 0, ("expert_unused_ratio", "1"): 1}
    complete(moe)
    load = moe.get("/v1/engine/experts").json()
    [tokens] = load["tokens"]
    assert load["layers"] == LAYERS and len(tokens) == EXPERTS
    assert sum(tokens) == (len(PROMPT) + NUM_TOKENS - 1) * PER_TOKEN  # the last is not computed
    assert gauges(moe) == {
        ("expert_load_imbalance", "1"): pytest.approx(imbalance(tokens)),
        ("expert_unused_ratio", "1"): unused(tokens),
    }


def test_a_trace_has_the_rows_of_each_expert(moe: httpx.Client) -> None:
    [before] = moe.get("/v1/engine/experts").json()["tokens"]
    answer = moe.post("/v1/engine/trace", json={"steps": 2, "prompt": "Once upon a time"}).json()
    [after] = moe.get("/v1/engine/experts").json()["tokens"]
    rows = [0] * EXPERTS
    for step in answer["engine"]["steps"]:
        [(layer, of_step)] = step["ranks"][0]["experts"].items()
        assert int(layer) == LAYERS[0] and len(of_step) == EXPERTS
        computed = sum(row["num_tokens"] for row in step["rows"])
        # several decodings may be one step
        assert sum(of_step) == PER_TOKEN * max(computed, step["num_tokens"])
        rows = [n + m for n, m in zip(rows, of_step)]
    assert any(rows) and all(n <= late - early for n, late, early in zip(rows, after, before))
