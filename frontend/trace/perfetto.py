"""A trace as a Chrome trace, for ui.perfetto.dev: a track for the frontend, one for the engine's
steps, one for the stages within a step, and one per thread of the kernels.

Must not know: where a trace comes from.
"""

from __future__ import annotations

from typing import Any

from ...ipc.trace import Hop, Kernel, StepTrace
from ..telemetry.chrome_trace import Event, event, label
from .recorded import RecordedTrace

FRONTEND, ENGINE = 1, 2  # processes
REQUESTS, OUTPUTS = 2, 3  # rows of the frontend: messages to the engine, and from it
STEPS, STAGES, KERNELS = 1, 2, 10  # rows of the engine; kernels from there on, by thread


def chrome_trace(trace: RecordedTrace) -> dict[str, Any]:
    """Returns the trace in the Trace Event Format; times are microseconds since the first step."""
    engine = trace.recorded
    zero_s = min((step.begin_s for step in engine.steps), default=0.0)
    events = [
        label("process_name", FRONTEND, 0, name="frontend"),
        label("thread_name", FRONTEND, 1, name="process outputs"),
        label("process_name", ENGINE, 0, name=f"engine, process {engine.pid}"),
        label("thread_name", ENGINE, STEPS, name="steps"),
        label("thread_name", ENGINE, STAGES, name="stages"),
    ]
    for one in trace.received:
        begin_us = 1e6 * (one.received_s - zero_s)
        events.append(
            event(
                "process_outputs",
                "frontend",
                FRONTEND,
                1,
                begin_us,
                begin_us + 1e6 * one.seconds,
                num_tokens=one.num_tokens,
            )
        )
    if engine.hops:
        events.append(label("thread_name", FRONTEND, REQUESTS, name="requests to the engine"))
        events.append(label("thread_name", FRONTEND, OUTPUTS, name="outputs of the engine"))
    for hop in engine.hops:
        events += _hop_events(hop, zero_s)
    threads: set[int] = set()
    for step in engine.steps:
        events += _step_events(step, zero_s)
        for rank in step.ranks:
            for kernel in rank.kernels:
                for thread, begin_s, end_s in kernel.threads or [_whole(kernel)]:
                    threads.add(thread)
                    events.append(_kernel_event(kernel, thread, begin_s - zero_s, end_s - zero_s))
    for thread in sorted(threads):
        row = KERNELS + thread
        events.append(label("thread_name", ENGINE, row, name=f"kernels, thread {thread}"))
        events.append(label("thread_sort_index", ENGINE, row, sort_index=row))
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"model": engine.model}}


def _hop_events(hop: Hop, zero_s: float) -> list[Event]:
    row = REQUESTS if hop.request_id else OUTPUTS
    encoded_s, decoded_s = hop.encode_begin_s + hop.encode_s, hop.decode_begin_s + hop.decode_s
    parts = [
        ("wait", hop.handed_s, hop.encode_begin_s),
        ("serialise", hop.encode_begin_s, encoded_s),
        ("socket", encoded_s, hop.decode_begin_s),
        ("deserialise", hop.decode_begin_s, decoded_s),
        ("wait", decoded_s, hop.taken_s or decoded_s),
    ]
    about = {"num_bytes": hop.num_bytes, "request": hop.request_id or None}
    return [
        event(name, "hop", FRONTEND, row, 1e6 * (a - zero_s), 1e6 * (b - zero_s), **about)
        for name, a, b in parts
        if b > a
    ]


def _whole(kernel: Kernel) -> tuple[int, float, float]:
    """Returns one span on thread 0, for a kernel whose threads are not known."""
    return 0, kernel.begin_s, kernel.begin_s + kernel.seconds


def _step_events(step: StepTrace, zero_s: float) -> list[Event]:
    scheduled_s = step.begin_s + step.schedule_s
    executed_s = step.execute_begin_s + step.execute_s
    parts = [
        ("schedule", step.begin_s, scheduled_s),
        ("execute", step.execute_begin_s, executed_s),
        ("process", executed_s, executed_s + step.process_s),
    ]
    spans = [
        (span.name, span.begin_s, span.begin_s + span.seconds)
        for rank in step.ranks
        for span in rank.spans
    ]
    rows = [(STEPS, one) for one in parts] + [(STAGES, one) for one in spans]
    return [
        event(
            f"{name} {step.step}" if row == STEPS else name,
            "step",
            ENGINE,
            row,
            1e6 * (begin_s - zero_s),
            1e6 * (end_s - zero_s),
            step=step.step,
        )
        for row, (name, begin_s, end_s) in rows
    ]


def _kernel_event(kernel: Kernel, thread: int, begin_s: float, end_s: float) -> Event:
    return event(
        f"{kernel.module or 'step'} {kernel.op}",
        "kernel",
        ENGINE,
        KERNELS + thread,
        1e6 * begin_s,
        1e6 * end_s,
        implementation=kernel.implementation,
        shape=kernel.shape,
        dtype=kernel.dtype,
        weight_bytes=kernel.weight_bytes,
        other_bytes=kernel.other_bytes,
        flops=kernel.flops,
        place=kernel.place,
    )
