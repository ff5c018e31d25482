"""The events of a finished request: its summary, its timeline, and the same as a Chrome trace.

Must not know: HTTP, the source of requests.

All times of a timeline are seconds since the engine accepted the request.

    queued ┤████│            │              │
    prefill     │██ ████ ████│              │   one prefill_chunk per step
    decode      │            │▏ ▏ ▏ ▏ ▏ ▏ ▏ │   one decode_step between two outputs
                scheduled    first_token    finished
"""

from __future__ import annotations

from typing import Any

from ..outputs import RequestMetrics
from .request_log import FinishedRequest

Event = dict[str, Any]


def summary_of(request: FinishedRequest) -> dict[str, Any]:
    """One request as an entry of a list."""
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
    """The summary, the times of the phases, and all events in order."""
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
    """The engine's events of the request; empty if the engine rejected it."""
    zero = metrics.queued_ts
    if not zero:
        return []
    end = metrics.last_token_ts
    found = [{"name": "queued", "begin_s": 0.0, "end_s": (metrics.scheduled_ts or end) - zero}]
    if metrics.num_cached_tokens:
        found.append(
            {
                "name": "cached",
                "begin_s": metrics.scheduled_ts - zero,
                "num_tokens": metrics.num_cached_tokens,
            }
        )
    found += [
        {
            "name": "prefill_chunk",
            "begin_s": begin - zero,
            "end_s": chunk_end - zero,
            "step": step,
            "num_tokens": num_tokens,
        }
        for step, begin, chunk_end, num_tokens in metrics.prefill_chunks
    ]
    found += [{"name": "preempted", "begin_s": moment - zero} for moment in metrics.preemption_ts]
    if metrics.first_token_ts:
        first = metrics.first_token_ts - zero
        found += [
            {"name": "first_token", "begin_s": first},
            {"name": "decode", "begin_s": first, "end_s": end - zero},
        ]
        found += _decode_steps(metrics, zero)
    found.append({"name": "finished", "begin_s": end - zero})
    return sorted(found, key=lambda event: event["begin_s"])


def _decode_steps(metrics: RequestMetrics, zero: float) -> list[Event]:
    """The intervals between the times of tokens.

    Tokens with the same time come from one step: several completions, or several tokens at once.
    """
    steps: list[Event] = []
    previous = None
    for moment in sorted(metrics.token_ts):
        if moment == previous:
            if steps:
                steps[-1]["num_tokens"] += 1
        elif previous is not None:
            steps.append(
                {
                    "name": "decode_step",
                    "begin_s": previous - zero,
                    "end_s": moment - zero,
                    "num_tokens": 1,
                }
            )
        previous = moment
    return steps


# Rows of the trace, top to bottom. Chunks and steps have rows of their own, since the events of a
# trace row must be nested.
ROWS = {
    "queued": "request",
    "decode": "request",
    "prefill": "request",
    "prefill_chunk": "prefill chunks",
    "decode_step": "decode steps",
}
THREADS = {"request": 1, "prefill chunks": 2, "decode steps": 3}


def chrome_trace(request: FinishedRequest) -> dict[str, Any]:
    """The timeline in the Trace Event Format (JSON) for Perfetto and chrome://tracing.

    Times are microseconds.
    """
    names = [
        _metadata("process_name", 0, request.request_id),
        *(_metadata("thread_name", tid, name) for name, tid in THREADS.items()),
    ]
    order = [
        {"name": "thread_sort_index", "ph": "M", "pid": 1, "tid": tid, "args": {"sort_index": tid}}
        for tid in THREADS.values()
    ]
    line = events(request.metrics)
    if request.metrics.scheduled_ts:
        zero, metrics = request.metrics.queued_ts, request.metrics
        line.append(
            {
                "name": "prefill",
                "begin_s": metrics.scheduled_ts - zero,
                "end_s": (metrics.first_token_ts or metrics.last_token_ts) - zero,
            }
        )
    return {
        "traceEvents": names
        + order
        + [_trace_event(event) for event in sorted(line, key=lambda event: event["begin_s"])],
        "displayTimeUnit": "ms",
        "otherData": {
            name: value for name, value in summary_of(request).items() if value is not None
        },
    }


def _metadata(kind: str, tid: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}


def _trace_event(event: Event) -> Event:
    """A span ("X", complete) or a moment ("i", instant)."""
    name, begin_us = event["name"], 1e6 * event["begin_s"]
    args = {key: event[key] for key in ("step", "num_tokens") if key in event}
    common = {
        "name": name,
        "cat": "request",
        "pid": 1,
        "tid": THREADS[ROWS.get(name, "request")],
        "ts": round(begin_us, 3),
        "args": args,
    }
    if "end_s" in event:
        return common | {"ph": "X", "dur": round(max(0.0, 1e6 * event["end_s"] - begin_us), 3)}
    return common | {"ph": "i", "s": "t"}
