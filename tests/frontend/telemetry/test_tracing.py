"""One span tree per request: names, parents, times, attributes, events, errors. Also the cost of
disabled tracing.
"""

from __future__ import annotations

import asyncio
import gzip
import http.server
import socket
import subprocess
import sys
import threading
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import StatusCode
from quire import (
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    InvalidParameterError,
    LLMEngine,
    SamplingParams,
)
from quire.frontend.clients.inproc_client import InprocClient
from quire.frontend.telemetry import export
from quire.tests.fake_engine import TroubledExecutor
from quire.tests.frontend.tiny_tokenizers import text_config

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


class Spans:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def trees(self) -> list[dict]:
        """Return each finished request's spans by name. Check that the children belong to their
        root and lie within its time.
        """
        spans, trees = self.exporter.get_finished_spans(), []
        for root in (span for span in spans if span.name == "llm_request"):
            children = [
                span
                for span in spans
                if span.parent is not None and span.parent.span_id == root.context.span_id
            ]
            assert all(
                root.start_time <= child.start_time <= child.end_time <= root.end_time
                for child in children
            )
            assert all(child.context.trace_id == root.context.trace_id for child in children)
            trees.append({"root": root} | {child.name: child for child in children})
        assert sum(map(len, trees)) == len(spans)
        return trees


@pytest.fixture
def spans() -> Spans:
    return Spans()


def make_engine(spans: Spans | None, **arguments) -> LLMEngine:
    config = text_config(served_model_name="tiny", **arguments)
    engine = LLMEngine(config, InprocClient(config, executor=TroubledExecutor(config)))
    if spans is not None:
        engine.set_tracer_provider(spans.provider)
    return engine


def run(engine: LLMEngine) -> dict:
    last = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    return last


def test_one_tree_per_request(spans):
    engine = make_engine(spans, hf_overrides={"delay_s": 0.002})
    begin = time.time_ns()
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.add_request("b", [4, 5], SamplingParams(max_tokens=3, top_k=7, seed=5))
    outputs = run(engine)
    trees = {tree["root"].attributes["gen_ai.response.id"]: tree for tree in spans.trees()}
    assert (
        sorted(trees) == ["a", "b"]
        and trees["a"]["root"].context.trace_id != trees["b"]["root"].context.trace_id
    )
    for name, tree in trees.items():
        metrics = outputs[name].metrics
        assert list(tree) == ["root", "queue", "prefill", "decode"] and tree["root"].parent is None
        assert begin - 1e6 < tree["root"].start_time and tree["root"].end_time < time.time_ns()
        assert (
            tree["queue"].end_time == tree["prefill"].start_time
            and tree["prefill"].end_time == tree["decode"].start_time
        )
        for child, seconds in (
            ("queue", metrics.queued_time),
            ("prefill", metrics.prefill_time),
            ("decode", metrics.decode_time),
        ):
            assert abs((tree[child].end_time - tree[child].start_time) / 1e9 - seconds) < 0.002
        assert tree["root"].status.status_code is StatusCode.UNSET and not tree["root"].events
    assert dict(trees["b"]["root"].attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "b",
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.response.time_to_first_chunk": outputs["b"].metrics.time_to_first_token,
    }
    engine.shutdown()


def test_names_follow_the_semantic_conventions(spans):
    engine = make_engine(spans)
    engine.add_request("a", [1, 2, 3], GREEDY, priority=2)
    run(engine)
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    [tree] = spans.trees()
    assert [name for name in tree["root"].attributes if name not in known] == [
        "quire.request.priority"
    ]
    engine.shutdown()


def test_the_callers_trace_is_continued(spans):
    engine = make_engine(spans)
    engine.add_request(
        "a", [1, 2, 3], GREEDY, trace_headers={"Traceparent": TRACEPARENT, "host": "x"}
    )
    with spans.provider.get_tracer("caller").start_as_current_span("caller") as caller:
        engine.add_request("b", [1, 2, 3], GREEDY)
        engine.add_request("c", [1, 2, 3], GREEDY, trace_headers={"traceparent": "nonsense"})
    spans.exporter.clear()
    run(engine)
    roots = {tree["root"].attributes["gen_ai.response.id"]: tree["root"] for tree in spans.trees()}
    assert (f"{roots['a'].context.trace_id:032x}", f"{roots['a'].parent.span_id:016x}") == (
        TRACE_ID,
        PARENT_ID,
    )
    assert roots["b"].parent.span_id == caller.get_span_context().span_id
    assert roots["c"].parent is None
    engine.shutdown()


def test_preemptions_are_events(spans):
    engine = make_engine(spans)
    engine.add_request("a", list(range(1, 40)), GREEDY)
    engine.step()
    engine.sleep()
    engine.wake_up()
    engine.step()
    engine.reset_prefix_cache(reset_running=True)
    run(engine)
    [tree] = spans.trees()
    assert [event.name for event in tree["root"].events] == ["preemption", "preemption"]
    assert all(
        tree["decode"].start_time <= event.timestamp <= tree["decode"].end_time
        for event in tree["root"].events
    )
    assert tree["root"].attributes["quire.num_preemptions"] == 2
    engine.shutdown()


def test_failures_aborts_and_refusals(spans):
    engine = make_engine(spans)
    request = engine.session.process("failed", [1, 2, 3], GREEDY)
    engine.client._engine.core.executor.nan_rows.add((request.core_request.request_id, 2))
    engine.session.submit(request)
    engine.add_request("gone", [1, 2], GREEDY)
    with pytest.raises(InvalidParameterError):
        engine.add_request("refused", [], GREEDY)
    engine.step()
    engine.abort_request("gone")
    run(engine)
    roots = {tree["root"].attributes["gen_ai.response.id"]: tree["root"] for tree in spans.trees()}
    assert sorted(roots) == ["failed", "gone"]
    failed, gone = roots["failed"], roots["gone"]
    assert (
        failed.status.status_code is StatusCode.ERROR and "not finite" in failed.status.description
    )
    assert failed.attributes["error.type"] == "engine" and failed.attributes[
        "gen_ai.response.finish_reasons"
    ] == ("error",)
    assert gone.status.status_code is StatusCode.UNSET and gone.attributes[
        "gen_ai.response.finish_reasons"
    ] == ("abort",)
    engine.shutdown()


def test_a_request_that_never_ran_has_only_a_queue(spans):
    engine = make_engine(spans, max_num_seqs=1)
    engine.add_request("runs", [1, 2, 3], GREEDY)
    engine.add_request("waits", [1, 2], GREEDY)
    engine.step()
    engine.pause("abort")
    run(engine)
    trees = {tree["root"].attributes["gen_ai.response.id"]: tree for tree in spans.trees()}
    assert list(trees["waits"]) == ["root", "queue"] and list(trees["runs"]) == [
        "root",
        "queue",
        "prefill",
        "decode",
    ]
    engine.shutdown()


def test_a_dead_engine_ends_its_requests_spans(spans):
    engine = make_engine(spans, hf_overrides={"raise_at_step": 1})
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    with pytest.raises(EngineDeadError):
        engine.step()
    engine.abort_all_requests()
    [tree] = spans.trees()
    assert (
        tree["root"].status.status_code is StatusCode.ERROR
        and "scripted failure" in tree["root"].status.description
    )
    assert tree["root"].attributes["error.type"] == "EngineDeadError"
    engine.shutdown()


def test_asyncio(spans):
    async def main() -> None:
        config = text_config(served_model_name="tiny")
        llm = AsyncLLM(config, InprocClient(config, executor=TroubledExecutor(config)))
        llm.set_tracer_provider(spans.provider)
        [
            _
            async for _ in llm.generate(
                [1, 2, 3], GREEDY, "a", trace_headers={"traceparent": TRACEPARENT}
            )
        ]
        endless = llm.generate([1, 2, 3], SamplingParams(max_tokens=None), "b")
        await anext(endless)
        llm.shutdown()
        with pytest.raises(EngineDeadError):
            while True:
                await anext(endless)

    asyncio.run(main())
    first, second = spans.trees()
    assert f"{first['root'].context.trace_id:032x}" == TRACE_ID
    assert second["root"].status.status_code is StatusCode.ERROR


def test_tracing_can_be_switched_off_and_on_while_running(spans):
    engine = make_engine(spans)
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.step()
    engine.set_tracer_provider(None)
    run(engine)
    engine.add_request("b", [1, 2, 3], GREEDY)
    engine.set_tracer_provider(spans.provider)
    run(engine)
    assert spans.trees() == []
    for wrong in (5, "provider", object()):
        with pytest.raises(
            InvalidParameterError, match="tracer_provider: must be an OpenTelemetry TracerProvider"
        ):
            engine.set_tracer_provider(wrong)
    engine.shutdown()


# ------------------------------------------------------------ installed packages, and cost


def test_a_missing_exporter_is_reported_before_an_engine_starts(monkeypatch):
    monkeypatch.setitem(export.EXPORTERS, "grpc", "opentelemetry.exporter.no_such_thing")
    with pytest.raises(
        InvalidParameterError,
        match=r"otlp_traces_endpoint: needs opentelemetry.exporter.no_such_thing.*pip install "
        "opentelemetry-sdk opentelemetry-exporter-otlp",
    ):
        LLMEngine.from_engine_args(
            EngineArgs("no such model", otlp_traces_endpoint="http://localhost:4317")
        )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke signals")
    with pytest.raises(InvalidParameterError, match="must be one of grpc, http/protobuf"):
        export.check_endpoint("traces", "http://localhost:4317")


def test_a_missing_sdk_is_reported(monkeypatch, spans):
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: None)
    engine = make_engine(None)
    with pytest.raises(
        InvalidParameterError,
        match="tracer_provider: needs opentelemetry.sdk, which is not installed",
    ):
        engine.set_tracer_provider(spans.provider)
    engine.shutdown()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_an_unreachable_endpoint_loses_only_its_spans(monkeypatch, protocol):
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.grpc",
        reason="opentelemetry-exporter-otlp is not installed",
    )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = make_engine(
            None, otlp_traces_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}"
        )
        engine.add_request("a", [1, 2, 3], GREEDY)
        assert len(run(engine)["a"].outputs[0].token_ids) == 8
        engine.shutdown()


def test_spans_and_metrics_arrive_at_the_endpoint(monkeypatch):
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.http",
        reason="opentelemetry-exporter-otlp is not installed",
    )
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received, measured = [], []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            (received if self.path == "/v1/traces" else measured).append(
                gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args) -> None:
            pass

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        engine = make_engine(
            None,
            otlp_traces_endpoint=f"{address}/v1/traces",
            otlp_metrics_endpoint=f"{address}/v1/metrics",
        )
        engine.add_request("a", [1, 2, 3], GREEDY)
        run(engine)
        engine.shutdown()  # sends the remaining spans and metrics
        server.shutdown()
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        assert any(f"gen_ai.server.{name}".encode() in body for body in measured)
    [resource] = [
        resource
        for body in received
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
    ]
    assert sorted(span.name for scope in resource.scope_spans for span in scope.spans) == [
        "decode",
        "llm_request",
        "prefill",
        "queue",
    ]
    assert {a.key: a.value.string_value for a in resource.resource.attributes}[
        "service.name"
    ] == "quire"


def test_nothing_is_imported_if_tracing_is_off():
    code = (
        "import sys\n"
        "from quire import LLM, SamplingParams\n"
        "with LLM(engine='process', skip_tokenizer_init=True) as llm:\n"
        "    llm.generate([1, 2, 3], SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr
