"""Merges the engines' timings of one request's completions.

Must not know: where they come from, or how they are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from ...ipc.messages import RequestTiming


class Timings:
    """The engine's timings of one request's completions, by engine id. A completion may continue on
    another engine, which received it later and knows nothing of the one before.
    """

    def __init__(self) -> None:
        self._last: dict[str, RequestTiming] = {}  # as sent
        self._before: dict[str, RequestTiming] = {}  # of the engines before

    def take(self, engine_id: str, timing: RequestTiming) -> None:
        last = self._last.get(engine_id)
        if last is not None and timing.queued_time > last.queued_time:
            self._before[engine_id] = _continued(self._before.get(engine_id), last)
        self._last[engine_id] = timing

    def merged(self) -> dict[str, Any]:
        """See merge_timings."""
        return merge_timings(_continued(self._before.get(key), t) for key, t in self._last.items())


def _continued(before: RequestTiming | None, timing: RequestTiming) -> RequestTiming:
    """`timing` with the first times and the counts of the engines before."""
    if before is None:
        return timing
    return replace(
        timing,
        queued_time=before.queued_time,
        scheduled_time=before.scheduled_time or timing.scheduled_time,
        first_token_time=before.first_token_time or timing.first_token_time,
        num_preemptions=before.num_preemptions + timing.num_preemptions,
        num_recomputed_tokens=before.num_recomputed_tokens + timing.num_recomputed_tokens,
        preemption_times=before.preemption_times + timing.preemption_times,
        prefill_chunks=before.prefill_chunks + timing.prefill_chunks,
    )


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
