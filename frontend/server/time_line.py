"""The events of a finished request: its summary, its timeline, and the same as a Chrome trace.

Must not know: HTTP, the source of requests.

All times of a timeline are seconds since the engine accepted the request.

    queued ┤████│            │              │
    prefill     │██ ████ ████│              │   one prefill_chunk per step
    decode      │            │▏ ▏ ▏ ▏ ▏ ▏ ▏ │   one decode_step between two outputs
                scheduled    first_token    finished
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

from ..outputs import RequestMetrics
from ..telemetry.chrome_trace import Event, event, label
from .request_log import FinishedRequest


def summary_of(request: FinishedRequest) -> dict[str, Any]:
    """Returns one request as an entry of a list."""
    metrics = request.metrics
    return {
        "id": request.request_id,
        "object": "request",
        "created": metrics.arrival_time,  # seconds since the Unix epoch
        **request.summary,
        "prompt_tokens": metrics.num_prompt_tokens,
        "completion_tokens": metrics.num_generation_tokens,
        "cached_tokens": metrics.num_cached_tokens or 0,
        "ttft_s": metrics.time_to_first_token,
        "e2e_s": metrics.e2e_latency,
        "num_preemptions": metrics.num_preemptions,
    }


def time_line(request: FinishedRequest) -> dict[str, Any]:
    """Returns the summary, the times of the phases, and all events in order."""
    metrics = request.metrics
    phases = {
        "queued_s": metrics.queued_time,
        "prefill_s": metrics.prefill_time,
        "decode_s": metrics.decode_time,
    }
    return (
        summary_of(request)
        | phases
        | {"num_recomputed_tokens": metrics.num_recomputed_tokens, "events": events(metrics)}
    )


def events(metrics: RequestMetrics) -> list[Event]:
    """Returns the engine's events of the request. The list is empty if the engine rejected it."""
    if not metrics.queued_ts:
        return []
    end = metrics.last_token_ts

    def at(name: str, begin_ts: float, end_ts: float | None = None, **more: int) -> Event:
        return _event(name, metrics.queued_ts, begin_ts, end_ts, **more)

    found = [at("queued", metrics.queued_ts, metrics.scheduled_ts or end)]
    if metrics.num_cached_tokens:
        found.append(at("cached", metrics.scheduled_ts, num_tokens=metrics.num_cached_tokens))
    found += [
        at("prefill_chunk", begin_ts, end_ts, step=step, num_tokens=num_tokens)
        for step, begin_ts, end_ts, num_tokens in metrics.prefill_chunks
    ]
    found += [at("preempted", moment) for moment in metrics.preemption_ts]
    if metrics.first_token_ts:
        found += [
            at("first_token", metrics.first_token_ts),
            at("decode", metrics.first_token_ts, end),
        ]
        # Tokens of the same time come from one step: several completions, or several at once.
        num_tokens_at = Counter(metrics.token_ts)
        found += [
            at("decode_step", previous, moment, num_tokens=num_tokens_at[moment])
            for previous, moment in pairwise(sorted(num_tokens_at))
        ]
    found.append(at("finished", end))
    return sorted(found, key=lambda event: event["begin_s"])


def _event(
    name: str, zero_ts: float, begin_ts: float, end_ts: float | None = None, **more: int
) -> Event:
    """Returns a moment or, with `end_ts`, a span."""
    end = {} if end_ts is None else {"end_s": end_ts - zero_ts}
    return {"name": name, "begin_s": begin_ts - zero_ts, **end, **more}


# The trace has these rows, top to bottom. Chunks and steps have rows of their own, since the
# events of a trace row must be nested.
ROWS = {1: "request", 2: "prefill chunks", 3: "decode steps"}
PID = 1
ROW_OF = {"prefill_chunk": 2, "decode_step": 3}  # of other events: 1


def chrome_trace(request: FinishedRequest) -> dict[str, Any]:
    """Returns the timeline in the Trace Event Format (JSON) for Perfetto and chrome://tracing.

    Times are microseconds.
    """
    metrics = request.metrics
    labels = [label("process_name", PID, 0, name=request.request_id)]
    labels += [label("thread_name", PID, row, name=name) for row, name in ROWS.items()]
    labels += [label("thread_sort_index", PID, row, sort_index=row) for row in ROWS]
    line = events(metrics)
    if metrics.scheduled_ts:
        end = metrics.first_token_ts or metrics.last_token_ts
        line.append(_event("prefill", metrics.queued_ts, metrics.scheduled_ts, end))
        line.sort(key=lambda event: event["begin_s"])
    return {
        "traceEvents": labels + list(map(_trace_event, line)),
        "displayTimeUnit": "ms",
        "otherData": {
            name: value for name, value in summary_of(request).items() if value is not None
        },
    }


def _trace_event(moment: Event) -> Event:
    name, end_us = moment["name"], None
    if "end_s" in moment:
        end_us = 1e6 * moment["end_s"]
    args = {key: moment[key] for key in ("step", "num_tokens") if key in moment}
    begin_us = 1e6 * moment["begin_s"]
    return event(name, "request", PID, ROW_OF.get(name, 1), begin_us, end_us, **args)
