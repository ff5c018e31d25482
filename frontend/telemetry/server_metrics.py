"""OpenTelemetry's metrics of servers for generative AI: how long requests took, their first tokens,
and each token after that.

Must not know: the engine, sockets, text.

A request is measured when it ends, so that nothing is done for it while it runs. A metrics reader
of the SDK sends the histograms at its interval (OTEL_METRIC_EXPORT_INTERVAL).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...ipc.config import EngineConfig
from .export import Telemeter

if TYPE_CHECKING:
    from ..requests.request_state import RequestState

# fmt: off
# The conventions' bounds of the buckets, in seconds.
DURATION_S = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92
)
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0
)
PER_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# fmt: on


class ServerMetrics(Telemeter):
    """Histograms of finished requests."""

    KIND, METHOD = "meter", "get_meter"

    def __init__(self, provider: Any, config: EngineConfig, *, is_ours: bool = False):
        super().__init__(provider, config, is_ours=is_ours)
        meter = provider.get_meter("quire")

        def histogram(name: str, about: str, bounds: tuple[float, ...]) -> Any:
            return meter.create_histogram(
                f"gen_ai.server.{name}",
                "s",
                about,
                explicit_bucket_boundaries_advisory=bounds,
            )

        self._duration = histogram(
            "request.duration", "Time from a request's arrival to its end.", DURATION_S
        )
        self._first_token = histogram(
            "time_to_first_token",
            "Time from a request's arrival to its first token, of requests without an error.",
            FIRST_TOKEN_S,
        )
        self._per_token = histogram(
            "time_per_output_token",
            "Mean time per token after the first, of requests without an error.",
            PER_TOKEN_S,
        )

    def finish(self, state: RequestState) -> None:
        """Measures a finished request."""
        metrics = state.metrics
        operation = "text_completion" if state.task is None else "embeddings"
        attributes = self._common | {"gen_ai.operation.name": operation}
        if state.error is not None:
            error = {"error.type": state.error_parameter or "engine"}
            self._duration.record(metrics.e2e_latency or 0.0, attributes | error)
            return
        self._duration.record(metrics.e2e_latency or 0.0, attributes)
        if metrics.time_to_first_token is not None:
            self._first_token.record(metrics.time_to_first_token, attributes)
        num_more = metrics.num_generation_tokens - len(state.completions)
        if metrics.decode_time is not None and num_more > 0:
            mean_s = metrics.decode_time * len(state.completions) / num_more
            self._per_token.record(mean_s, attributes)
