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
from collections.abc import Callable, Iterator
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

from ....ipc.counters import TEXTS, TEXTS_UNDER_THEIR_NAMES
from ....ipc.errors import EngineDeadError
from ...async_llm import AsyncLLM
from ..http.openapi import ApiRoute
from ..meters import Histogram
from ..state import ServerState
from ..totals import Totals

ENGINE_TIMEOUT_S = 2.0  # for the engine's counters; a longer step must not fail the scrape
LABELS = ("model_name", "engine")
# Probes and scrapers poll these routes; http_requests_total excludes them, as in vLLM.
PROBES = frozenset({"/health", "/health/ready", "/metrics", "/ping", "/load", "/version"})


Counts = dict[str, int]  # of get_metrics, and "num_queued" in the server


def _waiting(counts: Counts) -> int:
    return counts.get("num_waiting", 0) + counts.get("num_swapped", 0) + counts["num_queued"]


def _usage(counts: Counts) -> float:
    num_blocks = counts.get("num_blocks", 0)
    return 1 - counts["num_free_blocks"] / (num_blocks - 1) if num_blocks > 1 else 0.0


def _prompt_tokens(counts: Counts) -> int:
    names = "num_prompt_tokens", "prefix_cache_hits", "external_prefix_cache_hits"
    return sum(counts.get(name, 0) for name in names)


# vLLM's name maps to a counter or gauge of ipc/counters.py, or to the value for an engine and its
# text.
Table = dict[str, str | tuple[Callable[[Counts], float], str]]
LOAD: Table = {
    "num_requests_running": "num_running",
    "num_requests_waiting": (
        _waiting,
        "Waiting requests, in the server's queue and in the engine's.",
    ),
    "kv_cache_usage_perc": (
        _usage,
        "Share of the KV cache's blocks that requests use now, from 0 to 1.",
    ),
}
PROMPTS: Table = {
    "prompt_tokens": (_prompt_tokens, "Prompt tokens computed, or found in a cache."),
    "prompt_tokens_recomputed": "num_recomputed_tokens",
    "prompt_tokens_cached": "prefix_cache_hits",
}
COUNTERS: Table = {
    "generation_tokens": "num_generation_tokens",
    "prefix_cache_queries": "prefix_cache_queries",
    "prefix_cache_hits": "prefix_cache_hits",
    "external_prefix_cache_queries": "external_prefix_cache_queries",
    "external_prefix_cache_hits": "external_prefix_cache_hits",
    "mm_cache_queries": "mm_cache_queries",
    "mm_cache_hits": "mm_cache_hits",
    "num_preemptions": "num_preemptions",
    "spec_decode_num_drafts": "num_drafts",
    "spec_decode_num_draft_tokens": "num_draft_tokens",
    "spec_decode_num_accepted_tokens": "num_accepted_tokens",
}
# A key of the status of the engine's memory maps to the value of the label `kind`.
MEMORY = {
    "resident_bytes": "resident",
    "weights_bytes": "weights",
    "kv_cache_bytes": "kv_cache",
}
MEMORY_ABOUT = (
    "Bytes of the engine's processes: resident memory; weights; the whole KV cache, of which a CPU "
    "holds in memory what has been written. On several ranks, their sum."
)


def routes(state: ServerState) -> list[ApiRoute]:
    return _routes(Collector(state), is_one_process=state.server_config.api_server_count == 1)


def routes_of_several(
    front: ServerState, of_models: Callable[[], list[ServerState]]
) -> list[ApiRoute]:
    """Does the same for a server with several models, which come and go. Metrics of engines have
    the label model_name.
    """
    return _routes(CollectorOfSeveral(Collector(front), of_models))


def _routes(
    collector: Collector | CollectorOfSeveral, *, is_one_process: bool = True
) -> list[ApiRoute]:
    registry = CollectorRegistry()
    registry.register(collector)
    if is_one_process:
        ProcessCollector(registry=registry)

    async def metrics(request: Request) -> Response:
        await collector.ask_engines()
        # The text takes some milliseconds, so it is made in a thread.
        text = await asyncio.to_thread(generate_latest, registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return [ApiRoute("/metrics", metrics)]


class Collector:
    """Collects the current metrics of the server and the last known metrics of the engine."""

    def __init__(self, state: ServerState):
        self.state = state
        self._of_engines: dict[int, dict[str, int]] = {0: {}}
        self._statuses: dict[int, dict[str, Any]] = {0: {}}
        # The counts are those of all engines and of this server.
        self._own: dict[str, int] = {}
        self._status: dict[str, Any] = {}
        self._engines_up: list[bool] = []
        self._totals = Totals(state.started, state.meters)

    async def ask_engines(self) -> None:
        """Asks the engines. If one does not answer, its metrics stay as they were, and engine_up is
        0.
        """
        engine = self.state.engine
        self._totals = self.state.totals()
        self._engines_up = [False]
        if engine is None:
            return
        number = engine.config.device_config.data_parallel_size
        self._engines_up = [False] * number
        try:
            async with asyncio.timeout(ENGINE_TIMEOUT_S):
                self._own, self._status = await asyncio.gather(
                    engine.get_metrics(), engine.call_utility("status")
                )
                counts, statuses = {0: self._own}, {0: self._status}
                if number > 1:
                    counts, statuses = await asyncio.gather(
                        engine.client.call_each_async("get_metrics"),
                        engine.client.call_each_async("status"),
                    )
        except (EngineDeadError, TimeoutError):
            return
        self._of_engines |= counts
        self._statuses |= statuses
        for index in counts:
            self._engines_up[index] = True

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
        if self.state.server_config.vllm_metrics:
            yield from self._as_vllm("vllm:")

    @property
    def model_name(self) -> str:
        return self.state.model_name

    def of_engine(self) -> Iterator[Metric]:
        yield from self._as_vllm("quire:")
        yield from self._of_own_engine()
        if self.state.server_config.vllm_metrics:
            yield from self._as_vllm("vllm:")

    def of_server(self) -> Iterator[Metric]:
        yield from self._http()
        yield from self._of_the_server()

    def _as_vllm(self, prefix: str) -> Iterator[Metric]:
        state = self.state
        yield from self._of_each(prefix, LOAD, GaugeMetricFamily)
        yield from self._of_the_schedulers(prefix)
        yield from self._of_each(prefix, COUNTERS, CounterMetricFamily)
        # Requests are counted by the server, for all of its engines.
        values = (state.model_name, "0" if len(self._of_engines) == 1 else "all")
        by_reason = CounterMetricFamily(
            prefix + "request_success",
            "Requests that have ended, by finish reason; of n completions, that of the last.",
            labels=(*LABELS, "finished_reason"),
        )
        for reason, count in self._totals.meters.requests_by_reason.items():
            by_reason.add_metric((*values, reason), count)
        yield by_reason
        for name, histogram in self._totals.meters.histograms.items():
            yield _histogram(prefix + name, histogram.about, LABELS, {values: histogram})
        if state.engine is not None:
            yield self._cache_config(state.engine, prefix)

    def _of_each(self, prefix: str, table: Table, kind: Any) -> Iterator[Metric]:
        """Yields each metric with a sample per engine. Requests in the server's queue count for the
        first one.
        """
        for name, row in table.items():
            about = TEXTS[row] if isinstance(row, str) else row[1]
            family = kind(prefix + name, about, labels=LABELS)
            for index, counts in self._of_engines.items():
                counts = counts | {"num_queued": self._num_queued if index == 0 else 0}
                value = counts.get(row, 0) if isinstance(row, str) else row[0](counts)
                family.add_metric((self.state.model_name, str(index)), value)
            yield family

    @property
    def _num_queued(self) -> int:
        return self._totals.gauges["num_queued"]

    def _cache_config(self, engine: AsyncLLM, prefix: str) -> Metric:
        """Returns the cache settings as labels of a metric with value 1, the usual form of text in
        Prometheus.
        """
        settings = msgspec.structs.asdict(engine.config.cache_config)
        names = (*settings, "num_gpu_blocks", "engine")
        family = GaugeMetricFamily(
            prefix + "cache_config_info",
            "1; the labels are the settings of the KV cache.",
            labels=names,
        )
        for index, counts in self._of_engines.items():
            values = (*settings.values(), counts.get("num_blocks", 0), index)
            family.add_metric(tuple(map(str, values)), 1)
        return family

    def _of_the_schedulers(self, prefix: str) -> Iterator[Metric]:
        """Yields sources of prompt tokens, reasons why requests wait, sleep states, step sizes."""
        yield from self._of_each(prefix, PROMPTS, CounterMetricFamily)
        families = [
            CounterMetricFamily(
                prefix + "prompt_tokens_by_source",
                "Prompt tokens by where their KV entries came from: computed here, or a cache.",
                labels=(*LABELS, "source"),
            ),
            GaugeMetricFamily(
                prefix + "num_requests_waiting_by_reason",
                "Requests that wait for capacity, or because the engine is paused (deferred).",
                labels=(*LABELS, "reason"),
            ),
            GaugeMetricFamily(
                prefix + "engine_sleep_state",
                "1 for the engine's current state. weights_offloaded: level 1; discard_all: 2.",
                labels=(*LABELS, "sleep_state"),
            ),
        ]
        for index, counts in self._of_engines.items():
            self._add_scheduler(families, index, counts)
        yield from families
        if loras := self._status.get("loras"):
            yield _lora_info(prefix, loras, self.state.now())
        name = self.state.model_name
        by_position = CounterMetricFamily(
            prefix + "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position in a draft.",
            labels=(*LABELS, "position"),
        )
        steps: dict[tuple[str, ...], Histogram] = {}
        for index, status in self._statuses.items():
            for position, count in enumerate(status.get("accepted_per_pos", ())):
                by_position.add_metric((name, str(index), str(position)), count)
            if (tokens := status.get("step_tokens")) is not None:
                histogram = Histogram("Tokens per engine step.", tokens["bounds"])
                histogram.counts, histogram.sum = tokens["counts"], tokens["sum"]
                steps[name, str(index)] = histogram
        if by_position.samples:
            yield by_position
        if steps:
            about = "Tokens per engine step, prefill and decode."
            yield _histogram(prefix + "iteration_tokens_total", about, LABELS, steps)

    def _add_scheduler(self, families: list[Any], index: int, counts: dict[str, int]) -> None:
        by_source, by_reason, sleep_state = families
        values, status = (self.state.model_name, str(index)), self._statuses.get(index, {})
        by_source.add_metric((*values, "local_compute"), counts.get("num_prompt_tokens", 0))
        by_source.add_metric((*values, "local_cache_hit"), counts.get("prefix_cache_hits", 0))
        num_held, asleep = status.get("num_held", 0), status.get("asleep", ())
        num_queued = self._num_queued if index == 0 else 0
        num_waiting = counts.get("num_waiting", 0) + counts.get("num_swapped", 0) + num_queued
        by_reason.add_metric((*values, "capacity"), num_waiting - num_held)
        by_reason.add_metric((*values, "deferred"), num_held)
        now = (
            "awake" if not asleep else "discard_all" if "weights" in asleep else "weights_offloaded"
        )
        for name in ("awake", "weights_offloaded", "discard_all"):
            sleep_state.add_metric((*values, name), int(name == now))

    def _http(self) -> Iterator[Metric]:
        """Yields the names and labels of prometheus-fastapi-instrumentator, which vLLM uses."""
        meters = self._totals.meters
        requests = Counter[tuple[str, str, str]]()
        for (method, route, status), count in meters.http_requests.items():
            if route not in PROBES:
                requests[route, method, f"{status // 100}xx"] += count
        yield _by(
            "http_requests",
            "HTTP requests that were answered, or whose client left, without probes and scrapes.",
            ("handler", "method", "status"),
            requests,
        )
        yield _histogram(
            "http_request_duration_seconds",
            "Seconds from an HTTP request's arrival to the end of its answer, streams included.",
            ("handler", "method"),
            {
                (route, method): histogram
                for (method, route), histogram in meters.http_durations.items()
                if route not in PROBES
            },
        )

    def _of_own_engine(self) -> Iterator[Metric]:
        """Yields metrics of the engine and its queue that only Quire has."""
        totals = self._totals
        own = self._own | totals.of_client
        yield GaugeMetricFamily(
            "quire:engine_up",
            "1 if all engines answered this scrape, else 0.",
            value=int(bool(self._engines_up) and all(self._engines_up)),
        )
        if len(self._engines_up) > 1:
            yield _by(
                "quire:replica_up",
                "1 if the engine answered this scrape, else 0.",
                ("engine",),
                dict(enumerate(map(int, self._engines_up))),
                GaugeMetricFamily,
            )
        for name, about in TEXTS_UNDER_THEIR_NAMES.items():
            yield CounterMetricFamily(f"quire:{name}", about, value=own.get(name, 0))
        yield from self._of_memory()
        yield from self._of_restarts()
        yield GaugeMetricFamily(
            "quire:num_requests_swapped",
            TEXTS["num_swapped"],
            value=self._own.get("num_swapped", 0),
        )
        yield GaugeMetricFamily(
            "quire:num_requests_queued",
            "Requests in the server's own queue now, before the engine's.",
            value=self._num_queued,
        )
        yield GaugeMetricFamily(
            "quire:num_queued_tokens",
            "Prompt tokens of the requests in the server's own queue now.",
            value=totals.gauges["num_queued_tokens"],
        )
        yield _by(
            "quire:requests_rejected",
            "Requests rejected because the server's queue was full, by the bound that was reached.",
            ("bound",),
            totals.rejected,
        )
        yield from self._of_experts()

    def _of_memory(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "quire:engine_memory_bytes", MEMORY_ABOUT, labels=("engine", "kind")
        )
        for index, status in self._statuses.items():
            for key, kind in MEMORY.items():
                if (num_bytes := status.get("memory", {}).get(key)) is not None:
                    family.add_metric((str(index), kind), num_bytes)
        if family.samples:
            yield family

    def _of_experts(self) -> Iterator[Metric]:
        """Yields two gauges for each layer with experts. Gauges per expert would be thousands."""
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
        if (engine := self.state.engine) is None:
            return
        gaps = self._totals.meters.restart_gaps
        yield _by(
            "quire:engine_restarts",
            "Engines that took the place of one that died, by cause of the death.",
            ("cause",),
            self._totals.restarts,
        )
        if engine.client.standby_is_ready is not None:
            yield GaugeMetricFamily(
                "quire:engine_standby_ready",
                "1 if an engine stands by to take the place of one that dies, else 0.",
                value=int(engine.client.standby_is_ready),
            )
        yield _histogram("quire:engine_restart_gap_seconds", gaps.about, (), {(): gaps})

    def _of_the_server(self) -> Iterator[Metric]:
        """Yields metrics of the HTTP server that only Quire has."""
        meters = self._totals.meters
        yield _by(
            "quire:connections_refused",
            "Connections rejected before their first request, by code of the error.",
            ("code",),
            meters.connections_refused,
        )
        yield GaugeMetricFamily(
            "quire:http_requests_in_flight",
            "HTTP requests that are being answered now, this scrape included.",
            value=meters.num_http_requests,
        )
        yield GaugeMetricFamily(
            "quire:http_body_bytes",
            "Bytes of the bodies of HTTP requests that are being answered now.",
            value=meters.num_body_bytes,
        )
        yield _by(
            "quire:http_requests",
            "HTTP requests that were answered, or whose client left.",
            ("method", "route", "status"),
            meters.http_requests,
        )
        yield GaugeMetricFamily(
            "quire:start_time_seconds",
            "Start time of the server, in seconds since the Unix epoch.",
            value=self._totals.started,
        )


class CollectorOfSeveral:
    """Joins the metrics of several models under one name each."""

    def __init__(self, server: Collector, states: Callable[[], list[ServerState]]):
        self._server = server
        self._states = states
        self._of_models: list[Collector] = []

    async def ask_engines(self) -> None:
        known = {collector.state: collector for collector in self._of_models}
        self._of_models = [known.get(state) or Collector(state) for state in self._states()]
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
    """Follows vLLM's form: the names are labels, and the value is the time, so that the newest
    sample is known.
    """
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


def _by(
    name: str,
    about: str,
    labels: tuple[str, ...],
    counts: dict[Any, int],
    kind: Any = CounterMetricFamily,
) -> Metric:
    family = kind(name, about, labels=labels)
    for key, count in counts.items():
        family.add_metric(tuple(map(str, key if isinstance(key, tuple) else (key,))), count)
    return family
