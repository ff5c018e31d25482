"""Merges the engine's timings of one request's completions.

Must not know: where they come from, or how they are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...ipc.messages import RequestTiming


def merge_timings(timings: Iterable[RequestTiming]) -> dict[str, Any]:
    """The times of one request as fields of RequestMetrics: the first times of any completion, the
    last of all, and sums.
    """
    timings = list(timings)
    return {
        "queued_ts": min(timing.queued_time for timing in timings),
        "scheduled_ts": min(
            (timing.scheduled_time for timing in timings if timing.scheduled_time), default=0.0
        ),
        "first_token_ts": min(
            (timing.first_token_time for timing in timings if timing.first_token_time), default=0.0
        ),
        "last_token_ts": max(timing.last_token_time for timing in timings),
        "num_preemptions": sum(timing.num_preemptions for timing in timings),
        "num_recomputed_tokens": sum(timing.num_recomputed_tokens for timing in timings),
        "prefill_chunks": sorted(
            (chunk for timing in timings for chunk in timing.prefill_chunks),
            key=lambda chunk: chunk[1],
        ),
        "preemption_ts": sorted(moment for timing in timings for moment in timing.preemption_times),
    }
