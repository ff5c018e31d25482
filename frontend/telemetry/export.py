"""OpenTelemetry's exporters and providers, which spans and metrics share.

Must not know: what is exported.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any, ClassVar

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidParameterError

# At the end, an endpoint that does not answer loses its spans and delays no longer than this.
EXPORT_TIMEOUT_S = 3.0
# The keys are values of OpenTelemetry's own variable OTEL_EXPORTER_OTLP_{TRACES,METRICS}_PROTOCOL.
EXPORTERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}


def check_installed(parameter: str, *modules: str) -> None:
    """Raises InvalidParameterError if a package of the extra `tracing` is missing."""
    for module in ("opentelemetry.sdk", *modules):
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # a parent package is missing
            found = False
        if not found:
            raise InvalidParameterError(
                parameter,
                f"needs {module}, which is not installed: pip install opentelemetry-sdk "
                f"opentelemetry-exporter-otlp",
            )


def check_endpoint(kind: str, endpoint: str | None) -> None:
    """Raises InvalidParameterError if "traces" or "metrics" cannot be sent to `endpoint`. It is
    called before an engine is started. With None, none are sent.
    """
    if endpoint is not None:
        check_installed(f"otlp_{kind}_endpoint", _exporter_module(kind))


def _exporter_module(kind: str) -> str:
    variable = f"OTEL_EXPORTER_OTLP_{kind.upper()}_PROTOCOL"
    protocol = os.environ.get(variable, "grpc")
    if protocol not in EXPORTERS:
        raise InvalidParameterError(
            f"otlp_{kind}_endpoint",
            f"{variable} must be one of {', '.join(EXPORTERS)}, got {protocol!r}",
        )
    return f"{EXPORTERS[protocol]}.{kind.removesuffix('s')}_exporter"


def _exporter(kind: str, name: str, endpoint: str) -> Any:
    check_endpoint(kind, endpoint)
    module = importlib.import_module(_exporter_module(kind))
    return getattr(module, name)(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)


def _resource() -> Any:
    """Returns what spans and metrics say of this program."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "quire")})


def make_tracer_provider(endpoint: str) -> Any:
    """Returns a TracerProvider that sends spans to `endpoint` from its own thread."""
    exporter = _exporter("traces", "OTLPSpanExporter", endpoint)
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=_resource())
    provider.add_span_processor(
        BatchSpanProcessor(exporter, export_timeout_millis=EXPORT_TIMEOUT_S * 1000)
    )
    return provider


def make_meter_provider(endpoint: str) -> Any:
    """Returns a MeterProvider that sends metrics to `endpoint` from its own thread."""
    exporter = _exporter("metrics", "OTLPMetricExporter", endpoint)
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    reader = PeriodicExportingMetricReader(exporter, export_timeout_millis=EXPORT_TIMEOUT_S * 1000)
    return MeterProvider([reader], resource=_resource())


class Telemeter:
    """The base class of what reports requests to a provider of OpenTelemetry.

    `provider` is a TracerProvider or a MeterProvider. `is_ours` tells whether it is closed with
    this object. Raises InvalidParameterError for anything else.
    """

    KIND: ClassVar[str]  # kind of provider: "tracer" or "meter"
    METHOD: ClassVar[str]  # a method that the provider must have

    def __init__(self, provider: Any, config: EngineConfig, *, is_ours: bool = False):
        if not callable(getattr(provider, self.METHOD, None)):
            raise InvalidParameterError(
                f"{self.KIND}_provider",
                f"must be an OpenTelemetry {self.KIND.capitalize()}Provider, got "
                f"{type(provider).__name__}",
            )
        self._provider = provider if is_ours else None
        model = config.model_config.served_model_name or config.model_config.model
        self._common = {
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
        }

    def close(self) -> None:
        """Sends what is left, if the provider is ours. May be called twice."""
        provider, self._provider = self._provider, None
        if provider is not None:
            provider.shutdown()
