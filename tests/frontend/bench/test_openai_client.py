"""A streamed request: what is sent, what is read from different servers, and the name of each
failure.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from quire.frontend.bench.http_client import HttpClient
from quire.frontend.bench.load import LoadReport
from quire.frontend.bench.openai_client import (
    NO_TOKENS,
    Outcome,
    RequestOptions,
    StreamReader,
    error_text,
    first_model,
    stream_request,
)
from quire.frontend.bench.report import format_results, results_as_json
from quire.frontend.bench.statistics import summarize_run
from quire.tests.scripted_server import (
    DIE,
    HANG,
    STREAM_HEAD,
    Script,
    answer,
    chat_stream,
    chunked,
    completion_stream,
    event,
    scripted_server,
)


def send(
    script: Script | Callable[[dict[str, Any]], Script],
    options: RequestOptions = RequestOptions("m"),
    timeout_s: float = 30,
) -> Outcome:
    async def main() -> Outcome:
        async with scripted_server(script) as (url, server):
            client = HttpClient(url + "/v1", {}, timeout_s)
            prompt = [{"role": "user", "content": "x"}] if options.endpoint == "chat" else "x"
            try:
                return await stream_request(client, options, prompt, 8)
            finally:
                client.close()

    return asyncio.run(main())


def sent(options: RequestOptions) -> dict[str, Any]:
    bodies = []

    def script(request: dict[str, Any]) -> Script:
        bodies.append((request["path"], request["body"]))
        return completion_stream(["a"])

    send(script, options)
    return {"path": bodies[0][0], **bodies[0][1]}


def test_only_fields_of_the_api_are_sent() -> None:
    common = {
        "model": "m",
        "max_tokens": 8,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert sent(RequestOptions("m")) == {"path": "/v1/completions", "prompt": "x", **common}
    assert sent(RequestOptions("m", "chat")) == {
        "path": "/v1/chat/completions",
        "messages": [{"role": "user", "content": "x"}],
        **common,
    }


def test_extensions_are_sent_if_enabled() -> None:
    extra = {"min_tokens": 8, "max_tokens": None, "max_completion_tokens": 8}
    options = RequestOptions(
        "m", include_usage=False, ignore_eos=True, temperature=0.0, extra_body=extra
    )
    assert sent(options) == {
        "path": "/v1/completions",
        "model": "m",
        "prompt": "x",
        "stream": True,
        "ignore_eos": True,
        "temperature": 0.0,
        "min_tokens": 8,
        "max_completion_tokens": 8,
    }


def test_a_completion_s_stream() -> None:
    outcome = send(
        completion_stream(["On", "", "ce"], {"prompt_tokens": 5, "completion_tokens": 4})
    )
    assert (outcome.failure, outcome.text, outcome.finish_reason) == (None, "Once", "length")
    # a token may have no text; the last chunk, which has only a finish reason, is not a token
    assert len(outcome.token_times) == 3
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.counted_by) == (
        5,
        4,
        "usage",
    )
    assert outcome.start <= outcome.token_times[0] <= outcome.token_times[-1] <= outcome.end


def test_a_chat_stream_starts_with_its_text_not_its_role() -> None:
    outcome = send(chat_stream(["Hel", "lo"]), RequestOptions("m", "chat"))
    assert (outcome.failure, outcome.text, len(outcome.token_times)) == (None, "Hello", 2)
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.counted_by) == (
        None,
        2,
        "chunks",
    )


def test_reasoning_and_tool_calls_are_tokens() -> None:
    call = [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]
    deltas = [
        {"reasoning_content": "hm"},
        {"reasoning": "so", "content": None},
        {"tool_calls": call},
        {"content": ""},
    ]
    chunks = [event(choices=[{"delta": delta}]) for delta in deltas]
    outcome = send(
        chunked(*chunks, event(choices=[{"delta": {}, "finish_reason": "tool_calls"}])),
        RequestOptions("m", "chat"),
    )
    assert (outcome.failure, outcome.text, len(outcome.token_times), outcome.finish_reason) == (
        None,
        "hmso",
        3,
        "tool_calls",
    )


CHUNK = b'{"choices": [{"text": "a"}]}'
LAST = b'{"choices": [{"text": "b", "finish_reason": "stop"}]}'


@pytest.mark.parametrize(
    "parts",
    [
        [b"data: %b\r\n\r\n" % CHUNK, b": ping\r\n\r\ndata: %b\r\n\r\ndata: [DONE]\r\n\r\n" % LAST],
        [b"data:%b\n\ndata:%b\n\ndata:[DONE]\n\n" % (CHUNK, LAST)],
        [b"data: %b\n" % CHUNK, b"data: %b\ndata: [DONE]" % LAST],  # no blank lines, no end
        # an empty event, no [DONE]
        [b"event: message\nid: 1\ndata: %b\n\n" % CHUNK, b"data: \n\ndata: %b\n\n" % LAST],
        # one event in two lines
        [
            b'data: {"choices": [],\ndata: "usage": null}\n\ndata: %b\n\n' % CHUNK,
            b"data: %b\n\n" % LAST,
        ],
        [bytes([byte]) for byte in b"data: %b\n\ndata: %b\n\ndata: [DONE]\n\n" % (CHUNK, LAST)],
        [
            b'data: {"prompt_filter_results": [], "choices": null}\n\ndata: %b\n\n' % CHUNK,
            b"data: %b\n\n" % LAST,
        ],
    ],
)
def test_unusual_streams(parts: list[bytes]) -> None:
    outcome = send(chunked(*parts))
    assert (outcome.failure, outcome.failure_text, outcome.text, outcome.finish_reason) == (
        None,
        "",
        "ab",
        "stop",
    )
    assert len(outcome.token_times) == 2


def test_errors_after_done_are_ignored() -> None:
    outcome = send([*completion_stream(["a"])[:-1], DIE])
    assert (outcome.failure, outcome.text) == (None, "a")


@pytest.mark.parametrize(
    ("script", "kind", "text"),
    [
        (
            [
                answer(
                    '{"error": {"message": "queue is full", "code": "x"}}', "429 Too Many Requests"
                )
            ],
            "HTTP 429",
            "queue is full",
        ),
        ([answer('{"detail": "no"}', "404 Not Found")], "HTTP 404", "no"),
        (
            [answer("<h1>Bad gateway</h1>", "502 Bad Gateway", "text/html")],
            "HTTP 502",
            "<h1>Bad gateway</h1>",
        ),
        ([answer("", "500 Internal Server Error")], "HTTP 500", "(an empty answer)"),
        (
            [answer('{"choices": [{"text": "a"}]}')],
            "bad stream",
            "the answer to a request with stream=true is application/json",
        ),
        (chunked(b"data: nonsense\n\n"), "bad stream", "nonsense"),
        (
            chunked(b'data: {"choices": [{"text": 3}]}\n\n'),
            "bad stream",
            "Expected `str | null`, got `int`",
        ),
        (chunked(b"data: " + b"[" * 100_000 + b"\n\n"), "bad stream", "[[["),
        (chunked(b"hello"), "bad stream", "without a finish reason"),
        (
            chunked(event(choices=[{"text": "a"}])),
            "incomplete stream",
            "without a finish reason and without [DONE]",
        ),
        (
            chunked(
                event(choices=[{"text": "a"}]),
                event(error={"message": "engine died", "code": "500"}),
            ),
            "error in stream",
            "engine died",
        ),
        (
            chunked(event(object="error", message="too long", code=400)),
            "error in stream",
            "too long",
        ),
        (chunked(b"data: [DONE]\n\n"), "no tokens", "the answer is empty"),
        ([DIE], "connection lost", ""),
        ([*completion_stream(["a", "b"])[:3], DIE], "connection lost", ""),
        ([b"HTTP/1.1 200 OK\r\n", DIE], "connection lost", ""),
    ],
)
def test_each_failure_has_its_name(script: Script, kind: str, text: str) -> None:
    outcome = send(script)
    assert outcome.failure == kind and text in outcome.failure_text


def test_a_silent_server_is_a_timeout() -> None:
    assert send([STREAM_HEAD, HANG], timeout_s=0.05).failure == "timeout"


def test_times_of_an_outcome() -> None:
    outcome = Outcome(start=10.0, num_output_tokens=5, token_times=[11.0, 11.5, 13.0], end=13.0)
    assert (outcome.ttft, outcome.tpot, outcome.itls, outcome.e2e) == (1.0, 0.5, [0.5, 1.5], 3.0)
    single = Outcome(start=10.0, num_output_tokens=1, token_times=[11.0], end=11.0)
    assert (single.ttft, single.tpot, single.itls) == (1.0, None, [])
    assert Outcome(start=10.0).ttft is None


def test_an_empty_answer_whose_usage_counts_tokens_has_no_time_per_token() -> None:
    """As that of a model that thinks where nobody sees it."""
    outcome = Outcome(start=10.0, num_output_tokens=5, end=13.0, failure=NO_TOKENS)
    assert (outcome.tpot, outcome.ttft, outcome.itls) == (None, None, [])
    results = summarize_run([outcome], 3.0, {"tpot": 0.05, "ttft": 1.0})
    assert (results.num_good, results.num_failures) == (0, 1)
    report = LoadReport([outcome], start=10.0, duration_s=3.0, client_cpu_s=0.0)
    [row] = results_as_json(report, results)["requests"]
    assert (row["tpot_s"], row["num_output_tokens"]) == (None, 5)
    assert "failed requests" in format_results(report, results, {"tpot": 0.05})


def test_the_time_of_a_chunk_is_that_of_its_bytes() -> None:
    outcome = Outcome(start=0.0)
    reader = StreamReader(outcome)
    reader.feed(b"data: " + CHUNK + b"\n", 1.0)
    reader.feed(b"\ndata: " + CHUNK + b"\n\ndata: " + LAST + b"\n\n", 2.0)
    reader.finish(3.0)
    assert (outcome.token_times, outcome.end) == ([2.0, 2.0, 2.0], 2.0)


@pytest.mark.parametrize(
    ("script", "model"),
    [
        ([answer('{"object": "list", "data": [{"id": "a/b"}, {"id": "c"}]}')], "a/b"),
        ([answer("", "404 Not Found")], None),
        ([answer('{"data": []}')], None),
        ([answer("<html>")], None),
    ],
)
def test_the_server_s_first_model(script: Script, model: str | None) -> None:
    async def main() -> str | None:
        async with scripted_server(script) as (url, server):
            return await first_model(HttpClient(url + "/v1", {}, 30))

    assert asyncio.run(main()) == model


def test_error_messages() -> None:
    assert error_text(b'{"error": "short"}') == "short"
    assert error_text(b'{"error": {"message": "long", "type": "t"}}') == "long"
    assert error_text(b'{"object": "error", "message": "old", "code": 4}') == "old"
    assert error_text(b"\xff") == "\ufffd"
    assert (
        error_text(b'{"detail": [{"msg": "field required"}]}')
        == '{"detail": [{"msg": "field required"}]}'
    )
    assert len(error_text(b"x" * 10_000)) == 500
