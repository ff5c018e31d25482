"""`bench serve` from the first request to the results, with servers that behave differently."""

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from quire import InvalidParameterError
from quire.frontend.bench import openai_client, serve
from quire.frontend.bench.openai_client import RequestOptions
from quire.frontend.bench.options import ServeOptions, WorkloadOptions
from quire.frontend.bench.serve import BenchmarkError, ServeRun, run_serve, with_v1
from quire.frontend.bench.workloads import make_requests
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.scripted_server import (
    HANG,
    STREAM_HEAD,
    Script,
    ScriptedServer,
    answer,
    completion_stream,
    scripted_server,
)

MODELS = [answer('{"data": [{"id": "tiny"}]}')]
NOT_FOUND = [answer('{"detail": "Not Found"}', "404 Not Found")]
REQUESTS = make_requests(WorkloadOptions(num_prompts=6, input_len=4, output_len=3))
WARMUPS = make_requests(WorkloadOptions(num_prompts=1, input_len=4, output_len=3, seed=1))


def bench(
    script: Callable[[dict[str, Any]], Script],
    tokenizer: Tokenizer | None = None,
    model: str | None = None,
    **options: Any,
) -> tuple[ServeRun, ScriptedServer]:
    async def main() -> tuple[ServeRun, ScriptedServer]:
        async with scripted_server(script) as (url, server):
            run = await run_serve(
                ServeOptions(base_url=url, **options),
                RequestOptions(model),
                REQUESTS,
                WARMUPS,
                tokenizer,
            )
            return run, server

    return asyncio.run(main())


def good_server(request: dict[str, Any]) -> Script:
    return (
        MODELS
        if request["path"] == "/v1/models"
        else completion_stream(["a", "b", "c"], {"prompt_tokens": 4, "completion_tokens": 3})
    )


def test_a_run() -> None:
    run, server = bench(good_server, api_key="secret", max_concurrency=2)
    assert [outcome.failure for outcome in run.report.outcomes] == [None] * 6
    assert {request["headers"]["authorization"] for request in server.requests} == {"Bearer secret"}
    completions = [
        request["body"] for request in server.requests if request["path"] == "/v1/completions"
    ]
    # a warm-up and six
    assert (len(completions), {body["model"] for body in completions}, run.model) == (
        7,
        {"tiny"},
        "tiny",
    )
    assert [body["prompt"] for body in completions] == [
        request.prompt for request in [*WARMUPS, *REQUESTS]
    ]
    assert server.peak_open <= 2


def test_a_server_without_a_list_of_models_and_without_usage() -> None:
    tokenizer = Tokenizer(find_model_directory("bundled"))
    run, server = bench(
        lambda request: (
            NOT_FOUND if request["method"] == "GET" else completion_stream(["Once upon", " a time"])
        ),
        tokenizer,
    )
    assert run.model == "default"
    expected = len(tokenizer.encode("Once upon a time", add_special_tokens=False))
    assert [(outcome.num_output_tokens, outcome.counted_by) for outcome in run.report.outcomes] == [
        (expected, "tokenizer")
    ] * 6


def test_the_model_that_the_user_names_needs_no_list() -> None:
    refused = [answer("", "500 Internal Server Error")]
    run, server = bench(
        lambda request: refused if request["method"] == "GET" else completion_stream(["a"]),
        model="mine",
    )
    assert run.model == server.requests[-1]["body"]["model"] == "mine"


def test_a_server_that_never_lists_its_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "MODELS_TIMEOUT_S", 0.05)
    script = {"GET": [HANG], "POST": completion_stream(["a"])}
    run, _ = bench(lambda request: script[request["method"]], model="mine")
    assert run.model == "mine" and {outcome.failure for outcome in run.report.outcomes} == {None}
    with pytest.raises(BenchmarkError, match="timeout: /v1/models was not answered within 0.05 s"):
        bench(lambda request: script[request["method"]])


def test_failures_during_the_run_are_outcomes() -> None:
    answers = iter(
        [good_server({"path": ""})] * 4
        + [[answer('{"error": {"message": "full"}}', "429 Too Many Requests")]] * 3
    )
    run, _ = bench(
        lambda request: MODELS if request["method"] == "GET" else next(answers), max_concurrency=1
    )
    assert [outcome.failure for outcome in run.report.outcomes] == [None] * 3 + ["HTTP 429"] * 3


def test_a_server_that_refuses_the_warm_up_is_not_measured() -> None:
    refusal = [answer('{"error": {"message": "The model `x` does not exist"}}', "404 Not Found")]
    with pytest.raises(
        BenchmarkError, match="the warm-up failed: HTTP 404: The model `x` does not exist"
    ):
        bench(lambda request: MODELS if request["method"] == "GET" else refusal)


def test_a_wrong_key_is_reported_at_once() -> None:
    refusal = [answer('{"error": {"message": "Incorrect API key"}}', "401 Unauthorized")]
    with pytest.raises(BenchmarkError, match="HTTP 401: Incorrect API key"):
        bench(lambda request: refusal)


def test_no_listener() -> None:
    with pytest.raises(
        BenchmarkError,
        match="http://127.0.0.1:9: connection refused: .*; --ready-timeout SECONDS waits",
    ):
        asyncio.run(
            run_serve(
                ServeOptions(base_url="http://127.0.0.1:9"), RequestOptions(), REQUESTS, WARMUPS
            )
        )


def test_a_server_that_is_loading_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "POLL_INTERVAL_S", 0.001)
    loading = [answer('{"error": {"message": "loading, 40 %"}}', "503 Service Unavailable")]
    answers = iter([loading] * 3 + [MODELS])
    run, _ = bench(
        lambda request: next(answers) if request["method"] == "GET" else good_server(request),
        ready_timeout_s=60.0,
    )
    assert run.model == "tiny"
    with pytest.raises(BenchmarkError, match="HTTP 503: loading, 40 %"):
        bench(lambda request: loading)


def test_ctrl_c_keeps_what_was_measured() -> None:
    asked = []

    def script(request: dict[str, Any]) -> Script:
        if request["method"] == "GET":
            return MODELS
        asked.append(request)
        # the warm-up and three requests are answered; at the fourth the user interrupts
        if len(asked) == 5:
            asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGINT)
        return good_server(request) if len(asked) < 5 else [STREAM_HEAD, HANG]

    run, _ = bench(script, max_concurrency=1)
    assert run.report.was_interrupted
    assert [outcome is None for outcome in run.report.outcomes] == [False] * 3 + [True] * 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_urls_with_and_without_v1(url: str) -> None:
    assert with_v1(url) == "http://h:1/v1"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"request_rate": 0.0}, "--request-rate"),
        ({"request_rate": float("nan")}, "--request-rate"),
        ({"burstiness": 0.0}, "--burstiness"),
        ({"burstiness": float("inf")}, "--burstiness"),
        ({"max_concurrency": 0}, "--max-concurrency"),
        ({"num_warmups": -1}, "--num-warmups"),
        ({"timeout_s": 0.0}, "--timeout"),
        ({"ready_timeout_s": -1.0}, "--ready-timeout"),
    ],
)
def test_options_out_of_their_range(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        ServeOptions(**options)
    assert caught.value.parameter == name
