"""Meters: the server's counters of requests for /metrics. They are updated when a request ends, so
tokens add no overhead.

Must not know: how a metric is encoded, HTTP beyond route names and status codes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ...ipc.params import PoolingParams, SamplingParams
from ..outputs import RequestMetrics

# These are the upper bounds of the buckets, as vLLM has them.
# fmt: off
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)
PER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
REQUEST_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
    120, 240, 480, 960, 1920, 7680,
)
# fmt: on
HTTP_S = (0.1, 0.5, 1)
COMPLETIONS = (1, 2, 5, 10, 20, 50, 100)
TOKENS = (*(mantissa * 10**exponent for exponent in range(6) for mantissa in (1, 2, 5)), 1_000_000)
# The values are what a metric says, and its buckets.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Seconds from a request's arrival to its first token.", TTFT_S),
    "inter_token_latency_seconds": ("Seconds between consecutive tokens.", PER_TOKEN_S),
    "request_time_per_output_token_seconds": (
        "Mean seconds per output token after the first; one value for each request.",
        PER_TOKEN_S,
    ),
    "e2e_request_latency_seconds": ("Seconds from a request's arrival to its end.", REQUEST_S),
    "request_queue_time_seconds": (
        "Seconds that a request waited, in the server's queue and in the engine's.",
        REQUEST_S,
    ),
    "request_inference_time_seconds": (
        "Seconds from a request's first step to its last token.",
        REQUEST_S,
    ),
    "request_prefill_time_seconds": (
        "Seconds from a request's first step to its first token.",
        REQUEST_S,
    ),
    "request_decode_time_seconds": ("Seconds from a request's first token to its last.", REQUEST_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of a request that were computed: those that no cache held.",
        TOKENS,
    ),
    "request_generation_tokens": (
        "Output tokens of a request, all of its completions together.",
        TOKENS,
    ),
    "request_max_num_generation_tokens": (
        "Output tokens that a request may have at most: max_tokens times n.",
        TOKENS,
    ),
    "request_params_n": ("Completions (n) of a request.", COMPLETIONS),
    "request_params_max_tokens": ("max_tokens of a request that sets it.", TOKENS),
}


class Histogram:
    """Counts per bucket, where each bucket has an upper bound, and the sum of the values."""

    def __init__(self, about: str, bounds: tuple[float, ...]):
        self.about = about
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one has no upper bound
        self.sum = 0.0

    def observe(self, value: float | None, count: int = 1) -> None:
        """Ignores None."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += count
            self.sum += value * count

    def observe_all(self, values: Sequence[float]) -> None:
        """Adds many values in one pass."""
        ordered, end = sorted(values), 0
        for bucket, bound in enumerate((*self.bounds, float("inf"))):
            begin, end = end, bisect_right(ordered, bound, end)
            self.counts[bucket] += end - begin
        self.sum += sum(ordered)

    def add(self, counts: Sequence[int], total: float) -> None:
        """Adds the counts per bucket and the sum of another one with the same bounds."""
        self.counts = [own + other for own, other in zip(self.counts, counts, strict=True)]
        self.sum += total

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns (bound, number of observations up to it), as Prometheus requires."""
        total, buckets = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return buckets


def _computed(metrics: RequestMetrics) -> int | None:
    if metrics.num_prompt_tokens is None:
        return None
    return metrics.num_prompt_tokens - (metrics.num_cached_tokens or 0)


class Meters:
    """The meters of one server, with vLLM's names."""

    def __init__(self) -> None:
        # With n > 1, the reason is that of the last completion.
        self.requests_by_reason: Counter[str] = Counter(stop=0, length=0, abort=0, error=0)
        self.http_requests: Counter[tuple[str, str, int]] = Counter()  # by (method, route, status)
        self.http_durations: dict[tuple[str, str], Histogram] = {}  # by (method, route)
        self.num_http_requests = 0  # active
        self.num_body_bytes = 0  # of all active requests
        self.connections_refused: Counter[str] = Counter()  # by code; before the first request
        self.restart_gaps = Histogram(
            "Seconds from an engine's death to the next tokens of a request that it computed.",
            REQUEST_S,
        )
        self.histograms = {name: Histogram(*entry) for name, entry in HISTOGRAMS.items()}

    def packed(self) -> dict[str, Any]:
        """Returns all that is counted, for JSON and `add`."""
        return {
            "requests_by_reason": self.requests_by_reason,
            "connections_refused": self.connections_refused,
            "http_requests": list(self.http_requests.items()),
            "http_durations": [
                [key, one.counts, one.sum] for key, one in self.http_durations.items()
            ],
            "active": [self.num_http_requests, self.num_body_bytes],
            "restart_gaps": [self.restart_gaps.counts, self.restart_gaps.sum],
            "histograms": {name: [one.counts, one.sum] for name, one in self.histograms.items()},
        }

    def add(self, packed: dict[str, Any], *, is_over: bool) -> None:
        """Adds what another process has packed. `is_over`: none of its requests is active."""
        self.requests_by_reason.update(packed["requests_by_reason"])
        self.connections_refused.update(packed["connections_refused"])
        for (method, route, status), count in packed["http_requests"]:
            self.http_requests[method, route, status] += count
        for (method, route), counts, total in packed["http_durations"]:
            self._durations(method, route).add(counts, total)
        if not is_over:
            num_requests, num_bytes = packed["active"]
            self.num_http_requests += num_requests
            self.num_body_bytes += num_bytes
        self.restart_gaps.add(*packed["restart_gaps"])
        for name, (counts, total) in packed["histograms"].items():
            self.histograms[name].add(counts, total)

    def _durations(self, method: str, route: str) -> Histogram:
        if (histogram := self.http_durations.get((method, route))) is None:
            histogram = self.http_durations[method, route] = Histogram("", HTTP_S)
        return histogram

    def http_began(self) -> None:
        self.num_http_requests += 1

    def add_body_bytes(self, num_bytes: int) -> None:
        """Counts what an active request has sent."""
        self.num_body_bytes += num_bytes

    def http_ended(
        self, method: str, route: str, status: int, duration_s: float, num_body_bytes: int
    ) -> None:
        """Counts an HTTP request that has been answered, or whose client has disconnected.
        `num_body_bytes` is what it had sent.
        """
        self.num_http_requests -= 1
        self.num_body_bytes -= num_body_bytes
        self.http_requests[method, route, status] += 1
        self._durations(method, route).observe(duration_s)

    def request_ended(
        self,
        params: SamplingParams | PoolingParams,
        metrics: RequestMetrics,
        reason: str,
        queued_s: float = 0.0,
    ) -> None:
        """`queued_s` is the time in the server's queue, before the request's metrics began."""
        self.requests_by_reason[reason] += 1
        is_pooling = isinstance(params, PoolingParams)
        n, max_tokens = (1, None) if is_pooling else (params.n, params.max_tokens)
        # These times include the time in the server's queue.
        waited = {
            "time_to_first_token_seconds": metrics.time_to_first_token,
            "e2e_request_latency_seconds": metrics.e2e_latency,
            "request_queue_time_seconds": metrics.queued_time,
        }
        values = {name: s if s is None else s + queued_s for name, s in waited.items()} | {
            "request_inference_time_seconds": metrics.inference_time,
            "request_prefill_time_seconds": metrics.prefill_time,
            "request_decode_time_seconds": metrics.decode_time,
            "request_prompt_tokens": metrics.num_prompt_tokens,
            "request_prefill_kv_computed_tokens": _computed(metrics),
            "request_generation_tokens": None if is_pooling else metrics.num_generation_tokens,
            "request_params_n": None if is_pooling else n,
            "request_params_max_tokens": max_tokens,
            "request_max_num_generation_tokens": max_tokens and max_tokens * n,
        }
        for name, value in values.items():
            self.histograms[name].observe(value)
        self._observe_tokens(metrics, n)

    def _observe_tokens(self, metrics: RequestMetrics, n: int) -> None:
        """Observes the times between tokens. Times are stored for the first tokens only, and are
        mixed for several completions: the other tokens count with the request's mean.
        """
        num_gaps = metrics.num_generation_tokens - n
        if metrics.decode_time is None or num_gaps <= 0:
            return
        mean_s = metrics.decode_time * n / num_gaps
        self.histograms["request_time_per_output_token_seconds"].observe(mean_s)
        latency = self.histograms["inter_token_latency_seconds"]
        gaps = [end - begin for begin, end in pairwise(metrics.token_ts)] if n == 1 else []
        latency.observe_all(gaps)
        latency.observe(mean_s, num_gaps - len(gaps))
