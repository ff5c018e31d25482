"""/metrics: metrics of the server and its engine for Prometheus.

Must not know: where and when metrics are counted.

The names are vLLM's with the prefix quire:, and with --vllm-metrics also with vllm:. Metrics that
vLLM does not have use only quire:. http_requests_total and http_request_duration_seconds have no
prefix, as in vLLM.

The response is always in the text format 0.0.4, whatever the Accept header is: in OpenMetrics,
which Prometheus 2 prefers, prometheus-client escapes the colon of a name, and dashboards query
vllm:num_requests_running.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....ipc.errors import EngineDeadError
from ...async_llm import AsyncLLM
from ..meters import Histogram
from ..state import ServerState

ENGINE_TIMEOUT_S = 2.0  # for the engine's counters; a longer step must not fail the scrape
LABELS = ("model_name", "engine")
# Routes that probes and scrapers poll; http_requests_total excludes them, as in vLLM.
PROBES = frozenset({"/health", "/health/ready", "/metrics", "/ping", "/load", "/version"})

# vLLM's name -> (Quire's name in get_metrics, description)
COUNTERS = {
    "generation_tokens": ("num_generation_tokens", "Tokens generated."),
    "prefix_cache_queries": (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
    ),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("num_preemptions", "Preemptions of running requests."),
    "spec_decode_num_drafts": ("num_drafts", "Rows of steps that verified draft tokens."),
    "spec_decode_num_draft_tokens": ("num_draft_tokens", "Draft tokens that were verified."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Draft tokens accepted."),
}
# Engine counters that vLLM does not have, under their own names.
OWN_COUNTERS = (
    "num_recomputed_tokens",
    "num_blocks_swapped_out",
    "num_blocks_swapped_in",
    "num_blocks_copied",
    "num_requests_refused",
    "num_requests_orphaned",
    "num_grammar_refusals",
    "num_failed_utilities",
    "num_bad_frames",
    "num_lost_outputs",
    "num_overflowed_clients",
    "num_inputs_refused",
    "num_bad_engine_frames",
    "num_rejected_peers",
    "num_dropped_rows",
    "num_requests_resumed",
    "num_requests_quarantined",
)


def routes(state: ServerState) -> list[Route]:
    return _routes(Collector(state))


def routes_of_several(front: ServerState, of_models: list[ServerState]) -> list[Route]:
    """The same for a server with several models: those of engines have the label model_name."""
    return _routes(CollectorOfSeveral(Collector(front), [Collector(state) for state in of_models]))


def _routes(collector: Collector | CollectorOfSeveral) -> list[Route]:
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)

    async def metrics(request: Request) -> Response:
        await collector.ask_engines()
        # takes some milliseconds, so it runs in a thread
        text = await asyncio.to_thread(generate_latest, registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return [Route("/metrics", metrics)]


class Collector:
    """Collects the current metrics of the server and the last known metrics of the engine."""

    def __init__(self, state: ServerState):
        self._state = state
        self._of_engine: dict[str, int] = {}
        self._status: dict[str, Any] = {}
        self._is_engine_up = False

    async def ask_engines(self) -> None:
        """If the engine does not answer, its metrics stay as they were, and engine_up is 0."""
        engine = self._state.engine
        self._is_engine_up = False
        if engine is not None:
            try:
                async with asyncio.timeout(ENGINE_TIMEOUT_S):
                    self._of_engine, self._status = await asyncio.gather(
                        engine.get_metrics(), engine.call_utility("status")
                    )
                self._is_engine_up = True
            except (EngineDeadError, TimeoutError):
                pass

    def describe(self) -> list[Metric]:
        """Returns nothing: prometheus-client would otherwise collect once just to learn the
        names.
        """
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._as_vllm("quire:")
        yield from self._http()
        yield from self._of_own_engine()
        yield from self._of_the_server()
        if self._state.server_config.vllm_metrics:
            yield from self._as_vllm("vllm:")

    @property
    def model_name(self) -> str:
        return self._state.model_name

    def of_engine(self) -> Iterator[Metric]:
        yield from self._as_vllm("quire:")
        yield from self._of_own_engine()
        if self._state.server_config.vllm_metrics:
            yield from self._as_vllm("vllm:")

    def of_server(self) -> Iterator[Metric]:
        yield from self._http()
        yield from self._of_the_server()

    def _as_vllm(self, prefix: str) -> Iterator[Metric]:
        state, counts, values = self._state, self._of_engine, (self._state.model_name, "0")
        num_blocks = counts.get("num_blocks", 0)
        num_queued = state.admission.num_waiting if state.admission is not None else 0
        gauges = {
            "num_requests_running": (
                counts.get("num_running", 0),
                "Requests that the engine computes.",
            ),
            "num_requests_waiting": (
                counts.get("num_waiting", 0) + counts.get("num_swapped", 0) + num_queued,
                "Waiting requests, in the server's queue and in the engine's.",
            ),
            "kv_cache_usage_perc": (
                1 - counts["num_free_blocks"] / (num_blocks - 1) if num_blocks > 1 else 0.0,
                "Share of the KV cache in use, 0 to 1.",
            ),
        }
        for name, (value, about) in gauges.items():
            yield _with(GaugeMetricFamily(prefix + name, about, labels=LABELS), values, value)
        yield from self._of_the_scheduler(prefix, num_queued)
        for name, (key, about) in COUNTERS.items():
            yield _with(
                CounterMetricFamily(prefix + name, about, labels=LABELS), values, counts.get(key, 0)
            )
        by_reason = CounterMetricFamily(
            prefix + "request_success",
            "Finished requests, by finish reason.",
            labels=(*LABELS, "finished_reason"),
        )
        for reason, count in state.meters.requests_by_reason.items():
            by_reason.add_metric((*values, reason), count)
        yield by_reason
        for name, histogram in state.meters.histograms.items():
            yield _histogram(prefix + name, histogram.about, LABELS, {values: histogram})
        if state.engine is not None:
            yield self._cache_config(state.engine, prefix, num_blocks)

    def _cache_config(self, engine: AsyncLLM, prefix: str, num_blocks: int) -> Metric:
        """The cache settings as labels of a metric with value 1, the usual form of text in
        Prometheus.
        """
        settings = msgspec.structs.asdict(engine.config.cache_config) | {
            "num_gpu_blocks": num_blocks,
            "engine": "0",
        }
        family = GaugeMetricFamily(
            prefix + "cache_config_info", "The KV cache's settings.", labels=tuple(settings)
        )
        return _with(family, tuple(map(str, settings.values())), 1)

    def _of_the_scheduler(self, prefix: str, num_queued: int) -> Iterator[Metric]:
        """Sources of prompt tokens, reasons why requests wait, sleep states, and step sizes."""
        counts, status = self._of_engine, self._status
        values = (self._state.model_name, "0")
        computed, cached = counts.get("num_prompt_tokens", 0), counts.get("prefix_cache_hits", 0)
        for name, about, count in (
            ("prompt_tokens", "Prompt tokens, cached ones included.", computed + cached),
            ("prompt_tokens_cached", "Prompt tokens found in the prefix cache.", cached),
        ):
            yield _with(CounterMetricFamily(prefix + name, about, labels=LABELS), values, count)
        by_source = CounterMetricFamily(
            prefix + "prompt_tokens_by_source", "Prompt tokens.", labels=(*LABELS, "source")
        )
        by_source.add_metric((*values, "local_compute"), computed)
        by_source.add_metric((*values, "local_cache_hit"), cached)
        yield by_source

        num_held, asleep = status.get("num_held", 0), status.get("asleep", ())
        num_waiting = counts.get("num_waiting", 0) + counts.get("num_swapped", 0) + num_queued
        by_reason = GaugeMetricFamily(
            prefix + "num_requests_waiting_by_reason",
            "Requests that wait for capacity, or because the engine is paused (deferred).",
            labels=(*LABELS, "reason"),
        )
        by_reason.add_metric((*values, "capacity"), num_waiting - num_held)
        by_reason.add_metric((*values, "deferred"), num_held)
        yield by_reason
        sleep_state = GaugeMetricFamily(
            prefix + "engine_sleep_state",
            "1 for the engine's current state. weights_offloaded: level 1; discard_all: 2.",
            labels=(*LABELS, "sleep_state"),
        )
        now = (
            "awake" if not asleep else "discard_all" if "weights" in asleep else "weights_offloaded"
        )
        for name in ("awake", "weights_offloaded", "discard_all"):
            sleep_state.add_metric((*values, name), int(name == now))
        yield sleep_state

        if loras := status.get("loras"):
            yield _lora_info(prefix, loras, self._state.now())
        if per_pos := status.get("accepted_per_pos"):
            by_position = CounterMetricFamily(
                prefix + "spec_decode_num_accepted_tokens_per_pos",
                "Draft tokens accepted, by their position in a draft.",
                labels=(*LABELS, "position"),
            )
            for position, count in enumerate(per_pos):
                by_position.add_metric((*values, str(position)), count)
            yield by_position
        if (steps := status.get("step_tokens")) is not None:
            histogram = Histogram("Tokens per engine step, prefill and decode.", steps["bounds"])
            histogram.counts, histogram.sum = steps["counts"], steps["sum"]
            yield _histogram(
                prefix + "iteration_tokens_total", histogram.about, LABELS, {values: histogram}
            )

    def _http(self) -> Iterator[Metric]:
        """The names and labels of prometheus-fastapi-instrumentator, which vLLM uses."""
        meters = self._state.meters
        requests = Counter[tuple[str, str, str]]()
        for (method, route, status), count in meters.http_requests.items():
            if route not in PROBES:
                requests[route, method, f"{status // 100}xx"] += count
        yield _by(
            "http_requests",
            "Finished HTTP requests, probes excluded.",
            ("handler", "method", "status"),
            requests,
        )
        yield _histogram(
            "http_request_duration_seconds",
            "Seconds to serve an HTTP request, streaming included.",
            ("handler", "method"),
            {
                (route, method): histogram
                for (method, route), histogram in meters.http_durations.items()
                if route not in PROBES
            },
        )

    def _of_own_engine(self) -> Iterator[Metric]:
        """Metrics of the engine and its queue that only Quire has."""
        admission = self._state.admission
        yield GaugeMetricFamily(
            "quire:engine_up",
            "Whether the engine answered this scrape.",
            value=int(self._is_engine_up),
        )
        for name in OWN_COUNTERS:
            yield CounterMetricFamily(
                f"quire:{name}",
                "See frontend/telemetry/stats.py.",
                value=self._of_engine.get(name, 0),
            )
        yield from self._of_restarts()
        yield GaugeMetricFamily(
            "quire:num_requests_swapped",
            "Requests whose KV cache is in host memory.",
            value=self._of_engine.get("num_swapped", 0),
        )
        yield GaugeMetricFamily(
            "quire:num_requests_queued",
            "Requests in the server's queue.",
            value=admission.num_waiting if admission else 0,
        )
        yield GaugeMetricFamily(
            "quire:num_queued_tokens",
            "Their prompts' tokens.",
            value=admission.num_waiting_tokens if admission else 0,
        )
        yield _by(
            "quire:requests_rejected",
            "Requests rejected because the queue was full.",
            ("bound",),
            admission.num_refused if admission else {},
        )
        yield from self._of_experts()

    def _of_experts(self) -> Iterator[Metric]:
        """Two gauges for each layer with experts: those of each expert would be thousands."""
        if experts := self._status.get("experts"):
            imbalance = GaugeMetricFamily(
                "quire:expert_load_imbalance",
                "Tokens of a layer's busiest expert over the mean, since the weights were loaded.",
                labels=("layer",),
            )
            unused = GaugeMetricFamily(
                "quire:expert_unused_ratio",
                "Share of a layer's experts that got no token since the weights were loaded.",
                labels=("layer",),
            )
            for layer, of_busiest, without_tokens in experts:
                imbalance.add_metric([str(layer)], of_busiest)
                unused.add_metric([str(layer)], without_tokens)
            yield from (imbalance, unused)

    def _of_restarts(self) -> Iterator[Metric]:
        if (engine := self._state.engine) is None:
            return
        restarts, gaps = engine.client.restarts, self._state.meters.restart_gaps
        while restarts.gaps_s:
            gaps.observe(restarts.gaps_s.popleft())
        yield _by(
            "quire:engine_restarts",
            "Engines that took the place of one that died.",
            ("cause",),
            restarts.by_cause,
        )
        if engine.client.standby_is_ready is not None:
            yield GaugeMetricFamily(
                "quire:engine_standby_ready",
                "Whether an engine stands by to take the place of a dead one.",
                value=int(engine.client.standby_is_ready),
            )
        yield _histogram("quire:engine_restart_gap_seconds", gaps.about, (), {(): gaps})

    def _of_the_server(self) -> Iterator[Metric]:
        """Metrics of the HTTP server that only Quire has."""
        state, meters = self._state, self._state.meters
        yield _by(
            "quire:connections_refused",
            "Connections rejected before their first request.",
            ("code",),
            meters.connections_refused,
        )
        yield GaugeMetricFamily(
            "quire:http_requests_in_flight",
            "Active HTTP requests.",
            value=meters.num_http_requests,
        )
        yield GaugeMetricFamily(
            "quire:http_body_bytes",
            "Bytes of the bodies of active HTTP requests.",
            value=meters.num_body_bytes,
        )
        yield _by(
            "quire:http_requests",
            "Finished HTTP requests.",
            ("method", "route", "status"),
            meters.http_requests,
        )
        yield GaugeMetricFamily(
            "quire:start_time_seconds",
            "Start time of the server, in seconds since the Unix epoch.",
            value=state.started,
        )


class CollectorOfSeveral:
    """Joins the metrics of several models under one name each."""

    def __init__(self, server: Collector, of_models: list[Collector]):
        self._server = server
        self._of_models = of_models

    async def ask_engines(self) -> None:
        await asyncio.gather(*(collector.ask_engines() for collector in self._of_models))

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._of_models:
            for metric in collector.of_engine():
                family = families.setdefault(metric.name, metric)
                label = {"model_name": collector.model_name}
                samples = [one._replace(labels=label | one.labels) for one in metric.samples]
                family.samples = samples if family is metric else [*family.samples, *samples]
        yield from families.values()
        yield from self._server.of_server()


def _lora_info(prefix: str, loras: dict[str, Any], now: float) -> Metric:
    """vLLM's form: names as labels, and as value the time, so that the newest sample is known."""
    labels = {
        "max_lora": str(loras["max_loras"]),
        "running_lora_adapters": ",".join(loras["running"]),
        "waiting_lora_adapters": ",".join(loras["waiting"]),
    }
    family = GaugeMetricFamily(
        prefix + "lora_requests_info",
        "LoRA adapters of running and waiting requests; the value is the time, in Unix seconds.",
        labels=tuple(labels),
    )
    return _with(family, tuple(labels.values()), now)


def _with(family: Any, values: tuple[str, ...], value: float) -> Metric:
    family.add_metric(values, value)
    return family


def _histogram(
    name: str,
    about: str,
    labels: tuple[str, ...],
    histograms: dict[tuple[str, ...], Histogram],
) -> Metric:
    family = HistogramMetricFamily(name, about, labels=labels)
    for values, histogram in histograms.items():
        family.add_metric(values, histogram.cumulative(), histogram.sum)
    return family


def _by(name: str, about: str, labels: tuple[str, ...], counts: dict[Any, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=labels)
    for key, count in counts.items():
        family.add_metric(tuple(map(str, key if isinstance(key, tuple) else (key,))), count)
    return family
