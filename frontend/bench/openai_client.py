"""Sends one streamed request to a server of the OpenAI API and records what arrives, and when.

Must not know: any one server's extensions, workloads, when requests are sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec

from .http_client import TIMEOUT, Answer, Failure, HttpClient
from .sse import SseError, SseParser

ERROR_IN_STREAM = "error in stream"
BAD_STREAM = "bad stream"  # not an event stream, or data that is not a chunk
INCOMPLETE_STREAM = "incomplete stream"  # it ended regularly, without a finish reason or [DONE]
NO_TOKENS = "no tokens"
MAX_ERROR_TEXT = 500
MODELS_TIMEOUT_S = 30.0


class Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct, gc=False):
    """The fields of a chunk that are used; msgspec skips the rest."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    message: str | None = None  # errors of servers that omit the object around them


CHUNKS = msgspec.json.Decoder(Chunk)


@dataclass(slots=True)
class Outcome:
    """The result of one request. Times are from perf_counter."""

    start: float
    # None: the server does not report it, and it was not counted
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    counted_by: str = "chunks"  # source of the output token count: "usage", "tokenizer" or "chunks"
    # arrival times of chunks with tokens; a chunk may hold several
    token_times: list[float] = field(default_factory=list)
    end: float = 0.0
    finish_reason: str | None = None
    text: str = ""
    failure: str | None = None  # its kind
    failure_text: str = ""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token."""
        return self.token_times[0] - self.start if self.token_times else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for a single token, and for an empty answer."""
        return (
            (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)
            if self.num_output_tokens > 1 and self.token_times  # usage may count hidden tokens
            else None
        )

    @property
    def e2e(self) -> float:
        """Seconds to the last token or finish reason."""
        return self.end - self.start

    @property
    def itls(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [later - earlier for earlier, later in zip(self.token_times, self.token_times[1:])]


class StreamReader:
    """Reads one stream into an Outcome.

    A chunk has tokens if it has text, or, for completions, if it has a choice: a token may have no
    text of its own. A chat's first chunk has only a role and no token.
    """

    def __init__(self, outcome: Outcome):
        self.outcome = outcome
        self.usage: Usage | None = None
        self.is_done = False
        self._events = SseParser()
        self._pieces: list[str] = []

    def feed(self, data: bytes, now: float) -> None:
        """Reads data. Raises Failure for an error in the stream, and for data that is not a stream
        of chunks.
        """
        try:
            events = self._events.feed(data)
        except SseError as error:
            raise Failure(BAD_STREAM, str(error)) from None
        for event in events:
            self._take(event, now)

    def finish(self, now: float) -> None:
        """Ends the answer. Raises Failure if it is incomplete."""
        for event in self._events.finish():
            self._take(event, now)
        self.outcome.text = "".join(self._pieces)
        if not self.is_done and self.outcome.finish_reason is None:
            raise Failure(
                INCOMPLETE_STREAM if self.outcome.token_times else BAD_STREAM,
                "it ended without a finish reason and without [DONE]",
            )
        if not self.outcome.token_times:
            raise Failure(
                NO_TOKENS, f"the answer is empty (finish reason {self.outcome.finish_reason})"
            )

    def _take(self, event: bytes, now: float) -> None:
        try:
            chunk = CHUNKS.decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._take_no_chunk(event, now, error)
            return
        if chunk.choices:
            outcome = self.outcome
            for choice in chunk.choices:
                text, has_tokens = choice.text, choice.text is not None
                if (delta := choice.delta) is not None:
                    text = delta.content or delta.reasoning_content or delta.reasoning
                    has_tokens = bool(text or delta.tool_calls)
                if text:
                    self._pieces.append(text)
                if choice.finish_reason:
                    outcome.finish_reason = choice.finish_reason
                    # most servers end with an empty chunk
                    has_tokens = bool(text or (delta is not None and delta.tool_calls))
                if has_tokens:
                    outcome.token_times.append(now)
            outcome.end = now
        if chunk.usage is not None:
            self.usage = chunk.usage
        if chunk.error is not None or (chunk.message is not None and chunk.choices is None):
            raise Failure(ERROR_IN_STREAM, error_text(event))

    def _take_no_chunk(self, event: bytes, now: float, error: Exception) -> None:
        stripped = event.strip()
        if stripped == b"[DONE]":
            self.is_done = True
        elif b"\n" in stripped:  # events without the blank lines between them
            for line in stripped.split(b"\n"):
                self._take(line, now)
        elif stripped:
            raise Failure(
                BAD_STREAM, f"{error}: {stripped[:MAX_ERROR_TEXT].decode(errors='replace')}"
            )


@dataclass(frozen=True)
class RequestOptions:
    """Options that all requests of a run share.

    `extra_body` may replace any field; None in it omits the field.
    """

    model: str | None = None
    endpoint: str = "completions"  # or "chat"
    include_usage: bool = True
    ignore_eos: bool = False
    temperature: float | None = None
    extra_body: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return "/chat/completions" if self.endpoint == "chat" else "/completions"

    def body(self, prompt: str | list[int] | list[dict[str, Any]], max_tokens: int) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages" if self.endpoint == "chat" else "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True} if self.include_usage else None,
            "ignore_eos": self.ignore_eos or None,
            **self.extra_body,
        }
        return msgspec.json.encode(
            {name: value for name, value in fields.items() if value is not None}
        )


async def stream_request(
    client: HttpClient, options: RequestOptions, prompt: Any, max_tokens: int
) -> Outcome:
    """Sends one request and reads its stream. Failures are recorded in the Outcome; none is
    raised.
    """
    body = options.body(prompt, max_tokens)
    outcome = Outcome(start=perf_counter())
    reader = StreamReader(outcome)
    try:
        try:
            answer = await client.exchange("POST", options.path, body, reader.feed)
        except Failure:
            # after [DONE] it does not matter how the connection ends
            if not reader.is_done:
                raise
        else:
            check_answer(answer)
        reader.finish(perf_counter())
    except Failure as failure:
        outcome.failure, outcome.failure_text = failure.kind, failure.text
    outcome.end = outcome.end or perf_counter()
    if reader.usage is not None and reader.usage.completion_tokens:
        outcome.num_prompt_tokens = reader.usage.prompt_tokens
        outcome.num_output_tokens = reader.usage.completion_tokens
        outcome.counted_by = "usage"
    else:
        outcome.num_output_tokens = len(outcome.token_times)
    return outcome


def check_answer(answer: Answer) -> None:
    """Raises Failure for an answer that is not a stream."""
    if answer.status != 200:
        raise Failure(f"HTTP {answer.status}", error_text(bytes(answer.body)))
    if "json" in (kind := answer.headers.get("content-type", "")):
        raise Failure(BAD_STREAM, f"the answer to a request with stream=true is {kind}")


async def first_model(client: HttpClient) -> str | None:
    """Returns the first name of /v1/models, or None if the server has no such route.

    Raises Failure if there is no server, or it refuses.
    """
    try:
        async with asyncio.timeout(MODELS_TIMEOUT_S):
            answer = await client.exchange("GET", "/models")
    except TimeoutError:
        raise Failure(
            TIMEOUT, f"/v1/models was not answered within {MODELS_TIMEOUT_S:g} s"
        ) from None
    if answer.status in (404, 405, 501):
        return None
    if answer.status != 200:
        raise Failure(f"HTTP {answer.status}", error_text(bytes(answer.body)))
    try:
        return msgspec.json.decode(bytes(answer.body))["data"][0]["id"]
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        return None


def error_text(body: bytes) -> str:
    """Returns the message in an error's body, whatever its shape, or the beginning of the body."""
    try:
        found = msgspec.json.decode(body)
        for key in ("error", "detail", "message"):
            if isinstance(found, dict) and found.get(key):
                found = found[key]
        if isinstance(found, str):
            return found[:MAX_ERROR_TEXT]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    return body[:MAX_ERROR_TEXT].decode(errors="replace").strip() or "(an empty answer)"
