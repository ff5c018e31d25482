"""The three server metrics of OpenTelemetry's conventions for generative AI."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
from quire import InvalidParameterError, SamplingParams
from quire.frontend.telemetry import export, server_metrics
from quire.tests.frontend.telemetry.test_tracing import make_engine, run

ONE = SamplingParams(temperature=0.0, max_tokens=1)
EIGHT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
NAMES = {
    gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION,
    gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
    gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
}


def test_each_request_is_measured_when_it_ends() -> None:
    reader = InMemoryMetricReader()
    engine = make_engine(None, hf_overrides={"delay_s": 0.002})
    engine.set_meter_provider(MeterProvider([reader]))
    engine.add_request("a", [1, 2, 3], EIGHT)
    engine.add_request("b", [4, 5], ONE)
    outputs = run(engine)
    engine.set_meter_provider(None)
    engine.add_request("c", [4, 5], ONE)
    run(engine)
    data = reader.get_metrics_data()
    assert data is not None
    [scope] = data.resource_metrics[0].scope_metrics
    points = {}
    for metric in scope.metrics:
        assert metric.unit == "s"
        [points[metric.name]] = metric.data.data_points
    assert points.keys() == NAMES
    for point in points.values():
        assert dict(point.attributes) == {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "quire",
            "gen_ai.request.model": "tiny",
            "gen_ai.response.model": "tiny",
        }
    both = [outputs[name].metrics for name in "ab"]
    duration, first, each = (
        points["gen_ai.server.request.duration"],
        points["gen_ai.server.time_to_first_token"],
        points["gen_ai.server.time_per_output_token"],
    )
    assert (duration.count, first.count, each.count) == (2, 2, 1)  # one token has none after it
    assert duration.sum == pytest.approx(sum(one.e2e_latency for one in both))
    assert first.sum == pytest.approx(sum(one.time_to_first_token for one in both))
    assert each.sum == pytest.approx(both[0].decode_time / 7)
    assert each.explicit_bounds == server_metrics.PER_TOKEN_S
    engine.shutdown()


def test_what_cannot_be_used_is_named(monkeypatch) -> None:
    engine = make_engine(None)
    with pytest.raises(InvalidParameterError, match="meter_provider: must be an OpenTelemetry"):
        engine.set_meter_provider("localhost:4317")
    engine.shutdown()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "carrier pigeon")
    with pytest.raises(InvalidParameterError, match="otlp_metrics_endpoint: OTEL_EXPORTER_OTLP_M"):
        export.check_endpoint("metrics", "http://localhost:4317")
    export.check_endpoint("metrics", None)
