"""One OpenTelemetry span tree per request: `llm_request` over `queue`, `prefill` and `decode`, with
an event for each preemption.

Must not know: the engine, sockets, text: prompts and outputs never enter a span.

Spans are made when a request ends, from the times that the engine recorded; nothing is traced while
it runs. The engine's clock is mapped to the wall clock at the arrival of its last outputs, so child
spans are off by the transfer time of a message. A beam search is many requests with one tree each;
the caller's current span is their common parent.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ipc.config import EngineConfig
from ...ipc.params import PoolingParams, SamplingParams
from ..outputs import RequestMetrics
from ..requests.input_processor import ProcessedRequest
from .export import Telemeter, check_installed

if TYPE_CHECKING:
    from ..requests.request_state import RequestState


@dataclass(slots=True)
class _Begun:
    request: ProcessedRequest
    parent: Any  # opentelemetry.context.Context


class RequestTracer(Telemeter):
    """Traces the requests in progress, by user id."""

    KIND, METHOD = "tracer", "get_tracer"

    def __init__(self, provider: Any, config: EngineConfig, *, is_ours: bool = False):
        check_installed("tracer_provider")
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        super().__init__(provider, config, is_ours=is_ours)
        self._tracer = provider.get_tracer("quire")
        self._propagator = TraceContextTextMapPropagator()
        self._begun: dict[str, _Begun] = {}

    def begin(self, request: ProcessedRequest, trace_headers: dict[str, str] | None) -> None:
        """Registers a request. The headers name the parent; without them it is the caller's current
        span.
        """
        from opentelemetry import context

        if trace_headers is None:
            parent = context.get_current()
        else:
            parent = self._propagator.extract(
                {name.lower(): value for name, value in trace_headers.items()}, context.Context()
            )
        self._begun[request.request_id] = _Begun(request, parent)

    def finish(self, state: RequestState, clock_offset: float) -> None:
        """Makes the spans of a finished request.

        `clock_offset` + a time of the engine's clock = seconds since 1970.
        """
        begun = self._begun.pop(state.request_id, None)
        if begun is None:
            return  # the request began before tracing was enabled
        reasons = [str(completion.finish_reason) for completion in state.completions]
        attributes = _usage(state.metrics) | {"gen_ai.response.finish_reasons": reasons}
        error = None if state.error is None else (state.error_parameter or "engine", state.error)
        self._make_spans(begun, attributes, state.metrics, clock_offset, error)

    def fail(self, error: Exception) -> None:
        """Ends the spans of all requests in progress, which will not finish."""
        for begun in self._begun.values():
            request = begun.request
            metrics = RequestMetrics(
                request.core_request.arrival_time,
                finished_time=request.clock_offset + time.monotonic(),
            )
            self._make_spans(begun, {}, metrics, 0.0, (type(error).__name__, str(error)))
        self._begun.clear()

    def _make_spans(
        self,
        begun: _Begun,
        attributes: dict[str, Any],
        metrics: RequestMetrics,
        clock_offset: float,
        error: tuple[str, str] | None,
    ) -> None:
        """Makes the spans. `error` has its type and its message."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        end = metrics.finished_time
        assert end is not None  # the request has ended

        def wall(engine_ts: float) -> int:
            """Returns nanoseconds, limited to the root span."""
            return int(min(max(engine_ts + clock_offset, metrics.arrival_time), end) * 1e9)

        root = self._tracer.start_span(
            "llm_request",
            begun.parent,
            SpanKind.SERVER,
            self._common | _request_attributes(begun.request) | attributes,
            start_time=int(metrics.arrival_time * 1e9),
        )
        here = set_span_in_context(root, begun.parent)
        moments = [
            ("queue", metrics.queued_ts),
            ("prefill", metrics.scheduled_ts),
            ("decode", metrics.first_token_ts),
        ]
        ends = [metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts]
        for (name, start_ts), end_ts in zip(moments, ends, strict=True):
            if start_ts:
                child = self._tracer.start_span(name, here, start_time=wall(start_ts))
                child.end(wall(end_ts) if end_ts else int(end * 1e9))
        for moment in metrics.preemption_ts:
            root.add_event("preemption", timestamp=wall(moment))
        if error is not None:
            root.set_attribute("error.type", error[0])
            root.set_status(Status(StatusCode.ERROR, error[1]))
        root.end(int(end * 1e9))


def _request_attributes(request: ProcessedRequest) -> dict[str, Any]:
    """Returns the request's parameters under the names of the gen_ai conventions, without
    parameters that are unset by default.
    """
    core_request, params = request.core_request, request.core_request.params
    common = {
        "gen_ai.response.id": request.request_id,
        "gen_ai.usage.input_tokens": len(core_request.prompt_token_ids),
        "quire.request.priority": core_request.priority or None,
    }
    attributes = common | (
        _pooling_attributes(params)
        if isinstance(params, PoolingParams)
        else _sampling_attributes(params)
    )
    return {name: value for name, value in attributes.items() if value is not None}


def _pooling_attributes(params: PoolingParams) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.embeddings.dimension.count": params.dimensions,
        "quire.pooling.task": params.task,
    }


def _sampling_attributes(params: SamplingParams) -> dict[str, Any]:
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty or None,
        "gen_ai.request.presence_penalty": params.presence_penalty or None,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.stop_sequences": params.stop_list or None,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
    }


def _usage(metrics: RequestMetrics) -> dict[str, Any]:
    attributes = {
        "gen_ai.usage.output_tokens": metrics.num_generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": metrics.num_cached_tokens,
        "gen_ai.response.time_to_first_chunk": metrics.time_to_first_token,
        "quire.num_preemptions": metrics.num_preemptions or None,
        "quire.num_recomputed_tokens": metrics.num_recomputed_tokens or None,
    }
    return {name: value for name, value in attributes.items() if value is not None}
