"""The model server protocol of the Gateway API inference extension (its proposal 003, as of August
2026) against a running server: what an endpoint picker reads from /metrics, in the way it reads it,
and the model named in a body.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.server.conftest import running_server, slow_engine

BLOCK_SIZE, NUM_BLOCKS = 16, 501
LONG = {"prompt": [1] * 64, "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
LONG |= {"return_token_ids": True}  # this model has no text; without ids a stream has no chunks
# set by a picker and by gateways; the server must take requests that carry them
GATEWAY_HEADERS = {
    "x-gateway-destination-endpoint": "10.0.0.1:8000",
    "x-gateway-inference-objective": "food-review",
    "x-gateway-model-name-rewrite": "model",
    "x-gateway-inference-fairness-id": "tenant",
    "x-envoy-expected-rq-timeout-ms": "300000",
}


@pytest.fixture(scope="module")
def slow() -> Iterator[httpx.Client]:
    """A server of a base model and two adapters, one of which may run at a time."""
    limits = {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 2, "max_model_len": 4000}
    adapters = ("sql=/adapters/sql", "law=/adapters/law")
    with (
        slow_engine(0.02, num_gpu_blocks_override=NUM_BLOCKS, block_size=BLOCK_SIZE, **limits) as (
            address,
            _,
        ),
        running_server(
            *("--engine", address, "--vllm-metrics", "--lora-modules", *adapters)
        ) as client,
    ):
        yield client


def scrape(server: httpx.Client) -> dict[str, Metric]:
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


def latest(families: dict[str, Metric], name: str) -> Sample:
    """The picker takes one sample of a family: for adapters the one with the highest value."""
    assert families[name].type == "gauge"
    return max(families[name].samples, key=lambda sample: sample.value)


def gauge(server: httpx.Client, name: str) -> float:
    families = scrape(server)
    assert len(families[name].samples) == 1  # the picker would take any of several
    return latest(families, name).value


def adapters(server: httpx.Client) -> tuple[int, set[str], set[str], float]:
    """(max_lora, running, waiting, the sample's value)"""
    sample = latest(scrape(server), "vllm:lora_requests_info")
    names = ("running_lora_adapters", "waiting_lora_adapters")
    running, waiting = (set(filter(None, sample.labels[name].split(","))) for name in names)
    return int(sample.labels["max_lora"]), running, waiting, sample.value


@contextmanager
def begin(server: httpx.Client, **body: Any) -> Iterator[None]:
    """A stream that ends when the context does: then its client is gone."""
    with (
        httpx.Client(base_url=server.base_url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=LONG | body | {"stream": True}) as answer,
    ):
        assert answer.status_code == 200
        yield


def test_the_load_of_a_server(slow: httpx.Client) -> None:
    """Two requests run, and one waits for its adapter."""
    idle = [gauge(slow, f"vllm:num_requests_{state}") for state in ("waiting", "running")]
    assert idle == [0, 0] and gauge(slow, "vllm:kv_cache_usage_perc") == 0

    queued = LONG | {"model": "law", "max_tokens": 2}
    with ThreadPoolExecutor(1) as pool, ExitStack() as streams:
        for body in ({}, {"model": "sql"}):
            streams.enter_context(begin(slow, **body))
        wait_until(lambda: gauge(slow, "vllm:num_requests_running") == 2)
        answer = pool.submit(httpx.post, f"{slow.base_url}/v1/completions", json=queued, timeout=60)
        wait_until(lambda: gauge(slow, "vllm:num_requests_waiting") == 1)
        assert gauge(slow, "vllm:num_requests_running") == 2
        num_blocks = gauge(slow, "vllm:kv_cache_usage_perc") * (NUM_BLOCKS - 1)
        assert num_blocks == pytest.approx(round(num_blocks)) and 2 * 4 <= num_blocks < NUM_BLOCKS
        max_lora, running, waiting, value = adapters(slow)
        assert (max_lora, running, waiting) == (1, {"sql"}, {"law"})
        assert abs(value - time.time()) < 60
    assert answer.result().json()["model"] == "law"  # when the stream with sql has ended
    wait_until(lambda: gauge(slow, "vllm:num_requests_running") == 0)
    assert adapters(slow)[:3] == (1, set(), set()) and adapters(slow)[3] > value


def test_the_size_of_the_cache(slow: httpx.Client) -> None:
    families = scrape(slow)
    labels = latest(families, "vllm:cache_config_info").labels
    assert len(families["vllm:cache_config_info"].samples) == 1
    assert (labels["block_size"], labels["num_gpu_blocks"]) == (str(BLOCK_SIZE), str(NUM_BLOCKS))


def test_the_body_names_the_adapter(slow: httpx.Client) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "return_token_ids": True}

    def tokens(**more: str) -> list[int]:
        answer = slow.post("/v1/completions", json=body | more, headers=GATEWAY_HEADERS)
        assert answer.status_code == 200 and answer.json()["model"] == more.get("model", base)
        return answer.json()["choices"][0]["token_ids"]

    base = slow.get("/v1/models").json()["data"][0]["id"]
    of_base, of_sql, of_law = tokens(), tokens(model="sql"), tokens(model="law")
    assert len({tuple(found) for found in (of_base, of_sql, of_law)}) == 3
    missing = slow.post("/v1/completions", json=body | {"model": "poems"}, headers=GATEWAY_HEADERS)
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Once upon"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_both_apis_answer_behind_a_gateway(
    server: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    headers = GATEWAY_HEADERS | {"x-request-id": "of-the-gateway"}
    answer = server.post(path, json=body | {"max_tokens": 4}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert answer.headers["x-request-id"] == "of-the-gateway"
