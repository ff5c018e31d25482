"""/metrics: read by Prometheus' own parsers, against vLLM's published names."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import httpx2 as httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.routes import metrics
from quire.frontend.server.state import ServerState
from quire.tests.fakes import make_config
from quire.tests.frontend.server.conftest import running_server, slow_engine

# What vLLM's documentation and its Grafana dashboards ask for, of what a server without
# speculation, LoRA and images has.
OF_VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
}


def samples(client: httpx.Client) -> dict[str, float]:
    """Every sample without labels but those that tell samples of a name apart."""
    found = {}
    for family in parse(client.get("/metrics").text):
        for sample in family.samples:
            labels = [
                f"{name}={value}"
                for name, value in sample.labels.items()
                if name in ("finished_reason", "route", "status", "bound", "code")
            ]
            found[";".join([sample.name, *labels])] = (
                found.get(";".join([sample.name, *labels]), 0) + sample.value
            )
    return found


def test_a_request_is_counted(server: httpx.Client) -> None:
    before = samples(server)
    answer = server.post(
        "/v1/completions",
        json={
            "prompt": "Once upon a time",
            "max_tokens": 5,
            "ignore_eos": True,
            "n": 2,
            "temperature": 1,
        },
    ).json()
    after = samples(server)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    usage = answer["usage"]
    assert grown("quire:generation_tokens_total") == 10 == usage["completion_tokens"]
    assert (
        grown("quire:request_success_total;finished_reason=length") == 1
        and grown("quire:request_success_total;finished_reason=abort") == 0
    )
    assert (
        grown("quire:request_prompt_tokens_sum") == usage["prompt_tokens"]
        and grown("quire:request_params_n_sum") == 2
    )
    for name, kind in OF_VLLM.items():
        if kind == "histogram":
            assert grown(f"quire:{name}_count") == (
                8 if name == "inter_token_latency_seconds" else 1
            ), name
    assert grown("quire:http_requests_total;route=/v1/completions;status=200") == 1
    assert grown("quire:http_requests_total;route=/metrics;status=200") == 1
    server.get("/no/such/route")
    assert samples(server)["quire:http_requests_total;route=other;status=404"] >= 1
    assert after["quire:engine_up"] == 1 and after["quire:http_requests_in_flight"] == 1
    assert (
        after["process_resident_memory_bytes"] > 0 and 0 <= after["quire:kv_cache_usage_perc"] <= 1
    )
    assert not any(name.startswith("vllm:") for name in after)


def test_the_same_numbers_under_vllms_names() -> None:
    with (
        slow_engine(0.0) as (address, _),
        running_server("--engine", address, "--vllm-metrics") as client,
    ):
        client.post("/v1/completions", json={"prompt": [1, 2], "max_tokens": 3})
        families = {family.name: family for family in parse(client.get("/metrics").text)}
        for name, kind in OF_VLLM.items():
            theirs, ours = families[f"vllm:{name}"], families[f"quire:{name}"]
            assert theirs.type == kind and [(s.labels, s.value) for s in theirs.samples] == [
                (s.labels, s.value) for s in ours.samples
            ]
            assert all(s.labels["engine"] == "0" for s in theirs.samples)
        labels = families["vllm:cache_config_info"].samples[0].labels
        assert labels["block_size"] == "16" and labels["num_gpu_blocks"] == "5001"


def test_openmetrics(server: httpx.Client) -> None:
    answer = server.get(
        "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert answer.headers["content-type"].startswith("application/openmetrics-text") and list(
        parse_openmetrics(answer.text)
    )
    assert server.get("/metrics").headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize("answers", [True, False])
def test_an_engine_that_does_not_answer_does_not_hold_up_the_scrape(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(metrics, "ENGINE_TIMEOUT_S", 0.05)

    async def get_metrics() -> dict[str, int]:
        await asyncio.sleep(0 if answers else 60)
        return {"num_running": 3}

    state = ServerState(ServerConfig(), "m")
    state.engine = SimpleNamespace(get_metrics=get_metrics, config=make_config())
    collector = metrics.Collector(state)
    asyncio.run(collector.ask_engine())
    found = {
        family.name: family.samples[0].value for family in collector.collect() if family.samples
    }
    assert found["quire:engine_up"] == answers and found["quire:num_requests_running"] == (
        3 if answers else 0
    )
