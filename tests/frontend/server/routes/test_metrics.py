"""/metrics, read by Prometheus' own parsers and compared with vLLM's published names."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse
from quire.frontend.clients.client import Restarts
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.meters import Meters
from quire.frontend.server.routes import metrics
from quire.frontend.server.state import ServerState
from quire.tests.fakes import make_config
from quire.tests.frontend.server.conftest import running_server, slow_engine

ROOT = Path(__file__).resolve().parents[4]

# Metrics that vLLM's documentation and Grafana dashboards use, except those of LoRA and images.
OF_VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "cache_config_info": "gauge",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "num_preemptions": "counter",
    "external_prefix_cache_queries": "counter",
    "external_prefix_cache_hits": "counter",
    "spec_decode_num_drafts": "counter",
    "spec_decode_num_draft_tokens": "counter",
    "spec_decode_num_accepted_tokens": "counter",
    "prompt_tokens": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_prefill_kv_computed_tokens": "histogram",
    "prompt_tokens_recomputed": "counter",
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
    """Return every sample without labels, except labels that distinguish samples of one name."""
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

    def increases(name: str) -> float:
        return after[name] - before.get(name, 0)

    usage = answer["usage"]
    assert increases("quire:generation_tokens_total") == 10 == usage["completion_tokens"]
    assert (
        increases("quire:request_success_total;finished_reason=length") == 1
        and increases("quire:request_success_total;finished_reason=abort") == 0
    )
    assert (
        increases("quire:request_prompt_tokens_sum") == usage["prompt_tokens"]
        and increases("quire:request_params_n_sum") == 2
    )
    for name, kind in OF_VLLM.items():
        if kind == "histogram":
            assert increases(f"quire:{name}_count") == (
                8 if name == "inter_token_latency_seconds" else 1
            ), name
    assert increases("quire:http_requests_total;route=/v1/completions;status=200") == 1
    assert increases("quire:http_requests_total;route=/metrics;status=200") == 1
    server.get("/no/such/route")
    assert samples(server)["quire:http_requests_total;route=other;status=404"] >= 1
    assert after["quire:engine_up"] == 1 and after["quire:http_requests_in_flight"] == 1
    assert (
        after["process_resident_memory_bytes"] > 0 and 0 <= after["quire:kv_cache_usage_perc"] <= 1
    )
    assert not any(name.startswith("vllm:") for name in after)


# Queries of the dashboards in vLLM's examples/observability: prometheus_grafana/grafana.json,
# vllm_overview, vllm_service_status, performance_statistics, query_statistics, and the process and
# sleep panels of vllm_instances. Series -> values of the labels that a query selects or groups by.
DASHBOARDS = {
    "vllm:e2e_request_latency_seconds_bucket": {"le": None},
    "vllm:e2e_request_latency_seconds_sum": {},
    "vllm:e2e_request_latency_seconds_count": {},
    "vllm:time_to_first_token_seconds_bucket": {"le": {"0.1", "0.25", "0.5", "1.0", "2.5"}},
    "vllm:time_to_first_token_seconds_sum": {},
    "vllm:time_to_first_token_seconds_count": {},
    "vllm:inter_token_latency_seconds_bucket": {"le": None},
    "vllm:inter_token_latency_seconds_sum": {},
    "vllm:inter_token_latency_seconds_count": {},
    "vllm:request_time_per_output_token_seconds_bucket": {"le": {"0.05", "0.1"}},
    "vllm:request_time_per_output_token_seconds_sum": {},
    "vllm:request_time_per_output_token_seconds_count": {},
    "vllm:request_queue_time_seconds_bucket": {"le": None},
    "vllm:request_queue_time_seconds_sum": {},
    "vllm:request_queue_time_seconds_count": {},
    "vllm:request_prefill_time_seconds_sum": {},
    "vllm:request_prefill_time_seconds_count": {},
    "vllm:request_decode_time_seconds_sum": {},
    "vllm:request_decode_time_seconds_count": {},
    "vllm:request_prompt_tokens_bucket": {"le": None},
    "vllm:request_prompt_tokens_sum": {},
    "vllm:request_prompt_tokens_count": {},
    "vllm:request_generation_tokens_bucket": {"le": None},
    "vllm:request_generation_tokens_sum": {},
    "vllm:request_generation_tokens_count": {},
    "vllm:request_max_num_generation_tokens_sum": {},
    "vllm:iteration_tokens_total_bucket": {"le": {"1.0", "512.0", "16384.0", "+Inf"}},
    "vllm:iteration_tokens_total_sum": {},
    "vllm:iteration_tokens_total_count": {},
    "vllm:request_success_total": {"finished_reason": {"stop", "length", "abort", "error"}},
    "vllm:prompt_tokens_total": {},
    "vllm:prompt_tokens_cached_total": {},
    "vllm:prompt_tokens_by_source_total": {"source": {"local_compute", "local_cache_hit"}},
    "vllm:generation_tokens_total": {},
    "vllm:prefix_cache_queries_total": {},
    "vllm:prefix_cache_hits_total": {},
    "vllm:num_requests_running": {},
    "vllm:num_requests_waiting": {},
    "vllm:num_requests_waiting_by_reason": {"reason": {"capacity", "deferred"}},
    "vllm:num_preemptions_total": {},
    "vllm:kv_cache_usage_perc": {},
    "vllm:cache_config_info": {"num_gpu_blocks": None, "block_size": None},
    "vllm:engine_sleep_state": {"sleep_state": {"awake", "weights_offloaded", "discard_all"}},
    "http_requests_total": {"status": {"2xx", "4xx"}, "handler": {"/v1/completions"}},
    "http_request_duration_seconds_sum": {"handler": {"/v1/completions"}},
    "http_request_duration_seconds_count": {"handler": {"/v1/completions"}},
    "process_cpu_seconds_total": {},
    "process_resident_memory_bytes": {},
    "process_open_fds": {},
    "process_max_fds": {},
    "process_start_time_seconds": {},
}
# Queried by a panel that stays empty, since this engine lacks the feature.
ABSENT = ("vllm:lora_requests_info",)  # only with enable_lora: test_served_loras
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.4,*/*;q=0.1"
)


@pytest.fixture(scope="module")
def vllm_server() -> Iterator[httpx.Client]:
    with (
        slow_engine(0.0) as (address, _),
        running_server("--engine", address, "--vllm-metrics", "--admin") as client,
    ):
        body = {"prompt": list(range(1, 40)), "max_tokens": 3}
        for _ in range(2):
            client.post("/v1/completions", json=body)
        assert client.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
        yield client


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3, "*/*"])
def test_every_query_of_vllms_dashboards_finds_its_series(
    vllm_server: httpx.Client, accept: str
) -> None:
    answer = vllm_server.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found: dict[str, list[dict[str, str]]] = {}
    for family in parse(answer.text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    for series, selected in DASHBOARDS.items():
        assert series in found, series
        if series.startswith("vllm:"):
            needed = {"engine"} if series == "vllm:cache_config_info" else {"model_name", "engine"}
            assert all(needed <= labels.keys() for labels in found[series])
        for label, values in selected.items():
            present = {labels[label] for labels in found[series]}
            assert present and (values is None or values <= present), (series, label, present)
    assert found.keys().isdisjoint(ABSENT)


def test_the_same_numbers_under_both_prefixes(vllm_server: httpx.Client) -> None:
    families = {family.name: family for family in parse(vllm_server.get("/metrics").text)}
    for name, kind in OF_VLLM.items():
        vllm, own = families[f"vllm:{name}"], families[f"quire:{name}"]
        assert vllm.type == kind and [(s.labels, s.value) for s in vllm.samples] == [
            (s.labels, s.value) for s in own.samples
        ]
        assert all(s.labels["engine"] == "0" for s in vllm.samples)
    labels = families["vllm:cache_config_info"].samples[0].labels
    assert labels["block_size"] == "16" and labels["num_gpu_blocks"] == "5001"


def value_of(client: httpx.Client, series: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in parse(client.get("/metrics").text)
        for sample in family.samples
        if sample.name == series and labels.items() <= sample.labels.items()
    )


def test_tokens_per_step_add_up(vllm_server: httpx.Client) -> None:
    """Every computed prompt token and every generated token belongs to one step."""
    computed = value_of(vllm_server, "vllm:prompt_tokens_by_source_total", source="local_compute")
    generated = value_of(vllm_server, "vllm:generation_tokens_total")
    assert value_of(vllm_server, "vllm:iteration_tokens_total_sum") == computed + generated
    assert 0 < value_of(vllm_server, "vllm:iteration_tokens_total_count") <= generated
    assert value_of(vllm_server, "vllm:prompt_tokens_cached_total") == 32  # two blocks of 16
    assert value_of(vllm_server, "vllm:prompt_tokens_total") == 78


def test_http_requests_by_class_without_probes(vllm_server: httpx.Client) -> None:
    def count(**labels: str) -> float:
        return value_of(vllm_server, "http_requests_total", **labels)

    assert count(handler="/v1/completions", method="POST", status="2xx") == 2
    assert count(handler="/v1/completions", status="4xx") == 1
    assert count(handler="/metrics") == count(handler="/health/ready") == 0


def test_the_sleep_state_and_why_requests_wait(vllm_server: httpx.Client) -> None:
    def state() -> list[float]:
        names = ("awake", "weights_offloaded", "discard_all")
        return [value_of(vllm_server, "vllm:engine_sleep_state", sleep_state=n) for n in names]

    assert state() == [1, 0, 0]
    vllm_server.post("/sleep?level=1")
    assert state() == [0, 1, 0]
    vllm_server.post("/wake_up")
    assert state() == [1, 0, 0]


@pytest.mark.parametrize("answers", [True, False])
def test_an_engine_that_does_not_answer_does_not_block_the_scrape(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    monkeypatch.setattr(metrics, "ENGINE_TIMEOUT_S", 0.05)

    async def get_metrics() -> dict[str, int]:
        await asyncio.sleep(0 if answers else 60)
        return {"num_running": 3}

    async def call_utility(name: str) -> dict[str, Any]:
        return {}

    state = ServerState(ServerConfig(), "m")
    state.engine = SimpleNamespace(
        get_metrics=get_metrics,
        call_utility=call_utility,
        config=make_config(),
        client=SimpleNamespace(
            restarts=Restarts(Counter(SIGKILL=2), gaps_s=deque([0.5, 3.0])), standby_is_ready=True
        ),
    )
    collector = metrics.Collector(state)
    asyncio.run(collector.ask_engines())
    found = {
        family.name: family.samples[0].value for family in collector.collect() if family.samples
    }
    assert found["quire:engine_up"] == answers and found["quire:num_requests_running"] == (
        3 if answers else 0
    )
    assert found["quire:engine_restarts"] == 2


def test_layers_with_experts_have_two_gauges_each() -> None:
    async def get_metrics() -> dict[str, int]:
        return {}

    async def call_utility(name: str) -> dict[str, Any]:
        return {"experts": [[0, 1.5, 0.25], [3, 4.0, 0.75]]}

    state = ServerState(ServerConfig(), "m")
    state.engine = SimpleNamespace(
        get_metrics=get_metrics,
        call_utility=call_utility,
        config=make_config(),
        client=SimpleNamespace(restarts=Restarts(), standby_is_ready=None),
    )
    collector = metrics.Collector(state)
    asyncio.run(collector.ask_engines())
    found = {
        family.name: {one.labels["layer"]: one.value for one in family.samples}
        for family in collector.collect()
        if family.name.startswith("quire:expert")
    }
    assert found == {
        "quire:expert_load_imbalance": {"0": 1.5, "3": 4.0},
        "quire:expert_unused_ratio": {"0": 0.25, "3": 0.75},
    }


def test_accepted_drafts_by_position():
    state = SimpleNamespace(model_name="m", admission=None, started=0.0, meters=Meters())
    collector = metrics.Collector(state)  # type: ignore[arg-type]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"

    def samples() -> list[Any]:
        families = {family.name: family for family in collector._of_the_schedulers("vllm:")}
        return families[name].samples if name in families else []

    assert samples() == []
    collector._statuses[0] = {"accepted_per_pos": [5, 2]}
    assert [(s.labels["position"], s.value) for s in samples()] == [("0", 5), ("1", 2)]


def test_each_of_several_engines_has_its_label() -> None:
    counts = {0: {"num_running": 2, "num_prompt_tokens": 5}, 1: {"num_running": 3}}

    async def get_metrics() -> dict[str, int]:
        return {"num_running": 5, "num_bad_frames": 7}

    async def call_utility(name: str) -> dict[str, Any]:
        return {}

    async def call_each_async(name: str) -> dict[int, dict[str, Any]]:
        return dict(counts) if name == "get_metrics" else {0: {"num_held": 1}, 1: {}}

    state = ServerState(ServerConfig(), "m")
    state.engine = SimpleNamespace(
        get_metrics=get_metrics,
        call_utility=call_utility,
        config=make_config(data_parallel_size=2),
        client=SimpleNamespace(
            restarts=Restarts(), standby_is_ready=None, call_each_async=call_each_async
        ),
    )
    collector = metrics.Collector(state)

    def samples() -> dict[str, dict[str, float]]:
        asyncio.run(collector.ask_engines())
        return {
            family.name: {one.labels.get("engine", ""): one.value for one in family.samples}
            for family in collector.collect()
        }

    found = samples()
    assert found["quire:num_requests_running"] == {"0": 2, "1": 3}
    assert found["quire:prompt_tokens"] == {"0": 5, "1": 0}
    assert found["quire:cache_config_info"].keys() == {"0", "1"}
    assert found["quire:num_bad_frames"] == {"": 7}
    assert found["quire:replica_up"] == {"0": 1, "1": 1} and found["quire:engine_up"] == {"": 1}
    del counts[0]  # it is being replaced: what it counted stays
    found = samples()
    assert found["quire:num_requests_running"] == {"0": 2, "1": 3}
    assert found["quire:replica_up"] == {"0": 0, "1": 1} and found["quire:engine_up"] == {"": 0}


def all_families() -> dict[str, Any]:
    """Every metric that a server can have, by name: two replicas with experts, adapters, drafts and
    a standby.
    """
    status = {
        "experts": [[0, 1.5, 0.25]],
        "loras": {"max_loras": 1, "running": [], "waiting": []},
        "accepted_per_pos": [1],
        "step_tokens": {"bounds": (1, 2), "counts": [0, 0, 0], "sum": 0},
        "memory": {"resident_bytes": 3, "weights_bytes": 2, "kv_cache_bytes": 1},
    }

    async def get_metrics() -> dict[str, int]:
        return {}

    async def call_utility(name: str) -> dict[str, Any]:
        return status

    async def call_each_async(name: str) -> dict[int, dict[str, Any]]:
        return {0: status, 1: status} if name == "status" else {0: {}, 1: {}}

    state = ServerState(ServerConfig(), "m")
    state.engine = SimpleNamespace(
        get_metrics=get_metrics,
        call_utility=call_utility,
        config=make_config(data_parallel_size=2),
        client=SimpleNamespace(
            restarts=Restarts(), standby_is_ready=True, call_each_async=call_each_async
        ),
    )
    collector = metrics.Collector(state)
    asyncio.run(collector.ask_engines())
    families = list(collector.collect())
    names = [(one.name, one.type) for one in families]
    assert len(set(names)) == len(names)
    return {one.name + "_total" * (one.type == "counter"): one for one in families}


def test_the_page_of_the_metrics_lists_all() -> None:
    """docs/metrics.md: names, types, labels and what is counted are those of the code."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = []
    for name, family in all_families().items():
        labels = set(family._labelnames)
        if name == "quire:cache_config_info":
            labels = {"engine", "a label for each setting"}
        shown = ", ".join(sorted(labels)) or "–"
        rows.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    listed = [line for line in page.splitlines() if line.startswith(("| `quire:", "| `http_"))]
    assert listed == rows, "\n".join(rows)


def test_every_metric_says_what_it_counts() -> None:
    for name, family in all_families().items():
        about = family.documentation
        assert len(about) > 20 and about.endswith(".") and ".py" not in about, name


@pytest.mark.parametrize("file", ["dashboard.json", "alerts.yml"])
def test_dashboard_and_alert_rules_use_metrics_that_exist(file: str) -> None:
    text = (ROOT / "examples" / "monitoring" / file).read_text()
    parsed = json.loads(text) if file.endswith("json") else yaml.safe_load(text)
    assert len(parsed.get("panels") or parsed["groups"][0]["rules"]) >= 8
    series = set()
    for name, family in all_families().items():
        if family.type == "histogram":
            series |= {f"{name}_{end}" for end in ("bucket", "sum", "count")}
        else:
            series.add(name)
    used = set(re.findall(r"quire:\w+", text))
    assert len(used) >= 8 and used <= series, used - series


def test_the_memory_of_the_engine(server: httpx.Client) -> None:
    found = {
        kind: value_of(server, "quire:engine_memory_bytes", kind=kind)
        for kind in ("resident", "weights", "kv_cache")
    }
    assert 0 < found["weights"] < found["resident"] and found["kv_cache"] > 0
    # the engine's, not that of the server
    own = value_of(server, "process_resident_memory_bytes")
    assert found["resident"] != own and found["resident"] > 50e6
