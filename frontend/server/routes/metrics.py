"""/metrics: the server and its engine in numbers, for Prometheus.

Must not know: who counts, and when.

The names are vLLM's under the prefix quire:, and with --vllm-metrics under vllm: too. What vLLM
does not have has our prefix alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
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
from ..state import ServerState

ENGINE_TIMEOUT_S = 2.0  # for its counters; a longer step must not make the scrape fail
LABELS = ("model_name", "engine")

# vLLM's name -> (ours in get_metrics, what it is)
COUNTERS = {
    "prompt_tokens": ("num_prompt_tokens", "Prompt tokens computed."),
    "generation_tokens": ("num_generation_tokens", "Tokens generated."),
    "prefix_cache_queries": (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
    ),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "num_preemptions": ("num_preemptions", "Times a running request had to make room."),
}
# Counters of the engine that vLLM does not have, under their own names.
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
    "num_dropped_rows",
)


def routes(state: ServerState) -> list[Route]:
    registry = CollectorRegistry()
    collector = Collector(state)
    registry.register(collector)
    ProcessCollector(registry=registry)

    async def metrics(request: Request) -> Response:
        await collector.ask_engine()
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # some milliseconds, in which streams go on
        text = await asyncio.to_thread(encode, registry)
        return Response(text, headers={"content-type": content_type})

    return [Route("/metrics", metrics)]


class Collector:
    """All metrics as they are now; the engine's as it told them last."""

    def __init__(self, state: ServerState):
        self._state = state
        self._of_engine: dict[str, int] = {}
        self._is_engine_up = False

    async def ask_engine(self) -> None:
        """An engine that does not answer leaves its numbers as they were, and engine_up says so."""
        engine = self._state.engine
        self._is_engine_up = False
        if engine is not None:
            try:
                self._of_engine = await asyncio.wait_for(engine.get_metrics(), ENGINE_TIMEOUT_S)
                self._is_engine_up = True
            except (EngineDeadError, TimeoutError):
                pass

    def describe(self) -> list[Metric]:
        """Nothing: prometheus-client would collect once just to know the names."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._as_vllm("quire:")
        yield from self._own()
        if self._state.server_config.vllm_metrics:
            yield from self._as_vllm("vllm:")

    def _as_vllm(self, prefix: str) -> Iterator[Metric]:
        state, counts, values = self._state, self._of_engine, (self._state.model_name, "0")
        num_blocks = counts.get("num_blocks", 0)
        num_queued = state.admission.num_waiting if state.admission is not None else 0
        gauges = {
            "num_requests_running": (
                counts.get("num_running", 0),
                "Requests that take part in steps.",
            ),
            "num_requests_waiting": (
                counts.get("num_waiting", 0) + counts.get("num_swapped", 0) + num_queued,
                "Requests that wait, in the server's queue and in the engine's.",
            ),
            "kv_cache_usage_perc": (
                1 - counts["num_free_blocks"] / (num_blocks - 1) if num_blocks > 1 else 0.0,
                "Share of the KV cache in use, 0 to 1.",
            ),
        }
        for name, (value, about) in gauges.items():
            yield _with(GaugeMetricFamily(prefix + name, about, labels=LABELS), values, value)
        for name, (key, about) in COUNTERS.items():
            yield _with(
                CounterMetricFamily(prefix + name, about, labels=LABELS), values, counts.get(key, 0)
            )
        by_reason = CounterMetricFamily(
            prefix + "request_success",
            "Requests that have ended, by their reason.",
            labels=(*LABELS, "finished_reason"),
        )
        for reason, count in state.meters.requests_by_reason.items():
            by_reason.add_metric((*values, reason), count)
        yield by_reason
        for name, histogram in state.meters.histograms.items():
            family = HistogramMetricFamily(prefix + name, histogram.about, labels=LABELS)
            family.add_metric(values, histogram.cumulative(), histogram.sum)
            yield family
        if state.engine is not None:
            yield self._cache_config(prefix, num_blocks)

    def _cache_config(self, prefix: str, num_blocks: int) -> Metric:
        """The settings as labels of a 1, as Prometheus tells text."""
        settings = msgspec.structs.asdict(self._state.engine.config.cache_config) | {
            "num_gpu_blocks": num_blocks,
            "engine": "0",
        }
        family = GaugeMetricFamily(
            prefix + "cache_config_info", "The KV cache's settings.", labels=tuple(settings)
        )
        return _with(family, tuple(map(str, settings.values())), 1)

    def _own(self) -> Iterator[Metric]:
        """What only we have."""
        state, meters, admission = self._state, self._state.meters, self._state.admission
        yield GaugeMetricFamily(
            "quire:engine_up",
            "Whether the engine answered this very question.",
            value=int(self._is_engine_up),
        )
        for name in OWN_COUNTERS:
            yield CounterMetricFamily(
                f"quire:{name}", "See frontend/stats.py.", value=self._of_engine.get(name, 0)
            )
        yield GaugeMetricFamily(
            "quire:num_requests_swapped",
            "Requests whose KV cache lies in host memory.",
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
            "Requests that found the queue full.",
            ("bound",),
            admission.num_refused if admission else {},
        )
        yield _by(
            "quire:connections_refused",
            "Connections that were refused before they had a request.",
            ("code",),
            meters.connections_refused,
        )
        yield GaugeMetricFamily(
            "quire:http_requests_in_flight",
            "HTTP requests under way.",
            value=meters.num_http_requests,
        )
        yield GaugeMetricFamily(
            "quire:http_body_bytes",
            "Bytes of the bodies of HTTP requests under way.",
            value=meters.num_body_bytes,
        )
        yield _by(
            "quire:http_requests",
            "HTTP requests that have ended.",
            ("method", "route", "status"),
            meters.http_requests,
        )
        yield GaugeMetricFamily(
            "quire:start_time_seconds",
            "When the server began, in seconds since 1970.",
            value=state.started,
        )


def _with(family: Any, values: tuple[str, ...], value: float) -> Metric:
    family.add_metric(values, value)
    return family


def _by(name: str, about: str, labels: tuple[str, ...], counts: dict[Any, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=labels)
    for key, count in counts.items():
        family.add_metric(tuple(map(str, key if isinstance(key, tuple) else (key,))), count)
    return family
