"""The frontend's statistics: the log line, the counters and the tracing of requests.

Must not know: text, sockets, how a request is processed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ...ipc.config import EngineConfig
from ...ipc.counters import SchedulerStats
from ...ipc.messages import EngineCoreOutputs
from ..requests.input_processor import ProcessedRequest

if TYPE_CHECKING:
    from ..requests.request_state import RequestState
    from .server_metrics import ServerMetrics
    from .tracing import RequestTracer

logger = logging.getLogger("quire.stats")


class StatsLogger:
    """Logs one line every `interval_s` while outputs arrive, and one when the engine becomes idle
    if the last line is at least as old.

    It has no thread or timer: without outputs nothing is logged.
    """

    def __init__(self, interval_s: float, shares_engine: bool = False):
        self.interval_s = interval_s
        # other clients' work while this client is idle belongs to no interval
        self.shares_engine = shares_engine
        self._is_idle = True
        self._begin = 0.0  # start of the present interval
        self._last_line = float("-inf")
        # The statistics at the interval's start, and the latest ones, by engine_index. Without the
        # first, the next ones stand for them.
        self._base: dict[int, SchedulerStats] = {}
        self._latest: dict[int, SchedulerStats] = {}
        self._epochs: dict[int, int] = {}

    def begin(self) -> None:
        """Prepares for a request that is about to be sent.

        After an idle time it starts a new interval, so that the rates cover only the work.
        """
        if self._is_idle:
            self._is_idle = False
            self._begin = time.monotonic()
            self._base = {} if self.shares_engine else dict(self._latest)

    def record(self, stats: SchedulerStats, epoch: int = 0, engine_index: int = 0) -> None:
        """Processes an engine's statistics, which arrive with its outputs."""
        now = time.monotonic()
        if engine_index not in self._base or epoch != self._epochs.get(engine_index, 0):
            self._rebase(now, stats, epoch, engine_index)
        self._latest[engine_index] = stats
        if len(self._latest) > 1:
            stats = total(self._latest.values())
        self._is_idle = not (stats.num_running or stats.num_waiting or stats.num_swapped)
        if now - self._begin >= self.interval_s or (
            self._is_idle and now - self._last_line >= self.interval_s
        ):
            self.log(now)

    def _rebase(self, now: float, stats: SchedulerStats, epoch: int, engine_index: int) -> None:
        """Sets the statistics at the start for an engine that is new in this interval."""
        if epoch != self._epochs.get(engine_index, 0):
            self._epochs[engine_index] = epoch
            self._base[engine_index] = SchedulerStats()  # it replaced another and counts from 0
        elif self.shares_engine:
            self._begin = now
            self._base[engine_index] = stats
        else:
            self._base[engine_index] = SchedulerStats()

    def log(self, now: float | None = None) -> None:
        """Logs a line for the time since the last one, unless there are no statistics yet."""
        now = time.monotonic() if now is None else now
        if now > self._begin and self._latest:
            base, stats = total(self._base.values()), total(self._latest.values())
            logger.info("%s", format_line(base, stats, now - self._begin))
        self._begin, self._base, self._last_line = now, dict(self._latest), now


def total(stats: Collection[SchedulerStats]) -> SchedulerStats:
    """Returns the statistics of several engines together."""
    if len(stats) == 1:
        return next(iter(stats))
    names = SchedulerStats.__struct_fields__
    return SchedulerStats(*(sum(getattr(one, name) for one in stats) for name in names))


def format_line(base: SchedulerStats, stats: SchedulerStats, interval_s: float) -> str:
    """Returns the line for the `interval_s` seconds from `base` to `stats`."""
    queries = stats.prefix_cache_queries - base.prefix_cache_queries
    hits = stats.prefix_cache_hits - base.prefix_cache_hits
    usage = 1 - stats.num_free_blocks / (stats.num_blocks - 1) if stats.num_blocks > 1 else 0.0
    return (
        f"prompt throughput: {(stats.num_prompt_tokens - base.num_prompt_tokens) / interval_s:.1f} "
        f"tokens/s, "
        f"generation throughput: "
        f"{(stats.num_generation_tokens - base.num_generation_tokens) / interval_s:.1f} tokens/s, "
        f"running: {stats.num_running}, waiting: {stats.num_waiting}, swapped: "
        f"{stats.num_swapped}, "
        f"KV cache usage: {100 * usage:.1f}%, prefix cache hit rate: "
        f"{100 * hits / queries if queries else 0.0:.1f}%"
    )


class Telemetry:
    """The statistics and tracing that LLMEngine and AsyncLLM share: the engine's latest statistics,
    the log line, the counters and the spans.
    """

    def __init__(self, config: EngineConfig, shares_engine: bool):
        """`shares_engine` tells whether other clients may use the engine, too."""
        # the statistics of the engine after its last step, or the sum of several engines'
        self.stats: SchedulerStats | None = None
        self._stats: dict[int, SchedulerStats] = {}  # by engine_index
        self._config = config
        service = config.service_config
        self._log = (
            None
            if service.disable_log_stats
            else StatsLogger(service.log_stats_interval_s, shares_engine)
        )
        self._tracer: RequestTracer | None = None
        self._server_metrics: ServerMetrics | None = None
        if service.otlp_traces_endpoint is not None:
            from .export import make_tracer_provider

            self.set_tracer_provider(
                make_tracer_provider(service.otlp_traces_endpoint), is_ours=True
            )
        if service.otlp_metrics_endpoint is not None:
            from .export import make_meter_provider

            self.set_meter_provider(
                make_meter_provider(service.otlp_metrics_endpoint), is_ours=True
            )

    def log(self) -> None:
        """Logs a line of statistics now, unless disable_log_stats is set."""
        if self._log is not None:
            self._log.log()

    def set_meter_provider(self, provider: Any, *, is_ours: bool = False) -> None:
        """Measures later requests with this opentelemetry.metrics.MeterProvider. None stops
        measuring.
        """
        if self._server_metrics is not None:
            self._server_metrics.close()
        self._server_metrics = None
        if provider is not None:
            from .server_metrics import ServerMetrics

            self._server_metrics = ServerMetrics(provider, self._config, is_ours=is_ours)

    def finish(self, state: RequestState, clock_offset: float) -> None:
        """Reports a finished request. `clock_offset` leads from the engine's clock to seconds since
        1970.
        """
        if self._tracer is not None:
            self._tracer.finish(state, clock_offset)
        if self._server_metrics is not None:
            self._server_metrics.finish(state)

    def set_tracer_provider(self, provider: Any, *, is_ours: bool = False) -> None:
        """Records later requests as spans of this opentelemetry.trace.TracerProvider. None stops
        recording.
        """
        if self._tracer is not None:
            self._tracer.close()
        self._tracer = None
        if provider is not None:
            from .tracing import RequestTracer

            self._tracer = RequestTracer(provider, self._config, is_ours=is_ours)

    def begin(self, request: ProcessedRequest, trace_headers: dict[str, str] | None = None) -> None:
        """Registers a request before it is sent.

        `trace_headers`: the caller's trace context, as HTTP headers carry it (W3C traceparent).
        """
        if self._log is not None:
            self._log.begin()
        if self._tracer is not None:
            self._tracer.begin(request, trace_headers)

    def take(self, outputs: EngineCoreOutputs) -> None:
        """Processes outputs of the engine."""
        if outputs.stats is not None:
            self._stats[outputs.engine_index] = self.stats = outputs.stats
            if len(self._stats) > 1:
                self.stats = total(self._stats.values())
            if self._log is not None:
                self._log.record(outputs.stats, outputs.epoch, outputs.engine_index)

    def fail(self, error: Exception) -> None:
        """Ends the spans of the requests. It is called when the engine is gone, so no request will
        finish.
        """
        if self._tracer is not None:
            self._tracer.fail(error)

    def close(self) -> None:
        """Sends the remaining spans and metrics if this object owns their providers. May be called
        twice.
        """
        for part in (self._tracer, self._server_metrics):
            if part is not None:
                part.close()
