"""The response of /v1/completions, whole or streamed, in OpenAI's format with vLLM's extensions.

Must not know: how the body was checked, the engine.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from ...outputs import CompletionOutput, PositionLogprobs, RequestOutput
from ..generation import Job, all_of, merged, run
from ..http.call import Call
from ..http.sse import DONE, EventStream, encode, event, json_of
from ..state import ServerState
from ..token_logprobs import CompletionLogprobs, TokenWriter, joined, prompt_logprobs
from ..usage import Usage, UsageCounts


class CompletionChoice(msgspec.Struct, kw_only=True):
    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length", "content_filter"] | None = None
    # vLLM's extension: the stop token or string, null for the end of sequence
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: list[dict[str, Any] | None] | UnsetType | None = UNSET


class Completion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageCounts | UnsetType | None = UNSET
    system_fingerprint: str


class CompletionAnswer:
    """The response to one checked body (routes/completions.py).

    Without `gives_tokens`, the one token that the engine generates is omitted.
    """

    def __init__(
        self,
        state: ServerState,
        call: Call,
        body: Any,
        model: str,
        jobs: list[Job],
        *,
        gives_tokens: bool,
    ):
        self._state = state
        self._call = call
        self._body = body
        self._jobs = jobs
        self._gives_tokens = gives_tokens
        self._n = body.n or 1
        self._skips_special = body.skip_special_tokens is not False
        # Kept here, since active requests are completed even while the server shuts down.
        self._tokenizer = state.ready_engine().tokenizer
        self._writer = TokenWriter(self._tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._usage = Usage()
        # by the index of the choice: where its next token begins in its text
        self._offsets: dict[int, int] = {}
        self._head = {
            "id": f"cmpl-{call.suffix}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    def _runs(
        self, write_down: Callable[[RequestOutput], bytes] | None = None
    ) -> list[AsyncGenerator[RequestOutput, None]]:
        """The outputs of each prompt. `write_down`: converts an output to a piece of a stream.

        It is used directly only with a single prompt. With several, the task of the stream
        interleaves the outputs.
        """
        if write_down is not None and len(self._jobs) == 1:
            return [
                run(self._state, self._call, self._jobs[0], partial(self._call.push, write_down))
            ]
        return [run(self._state, self._call, job) for job in self._jobs]

    def _answer(self, choices: list[CompletionChoice], usage: Any = UNSET) -> Completion:
        return Completion(
            **self._head,
            choices=choices,
            usage=usage,
            system_fingerprint=self._state.system_fingerprint,
        )

    # ------------------------------------------------------------ whole

    async def whole(self) -> Response:
        outputs = await all_of(self._runs())
        num_positions = sum(
            len(output.prompt_logprobs or []) + sum(len(c.logprobs or []) for c in output.outputs)
            for output in outputs
        )
        return await json_of(
            lambda: self._completion(outputs),
            num_positions * (1 + max(0, self._body.logprobs or 0)),
        )

    def _completion(self, outputs: list[RequestOutput]) -> Completion:
        choices = []
        for prompt_index, output in enumerate(outputs):
            self._count(prompt_index, output)
            for completion in self._chosen(output):
                choice = self._choice(prompt_index, completion)
                if self._body.echo:
                    self._put_before(choice, self._echo(prompt_index, choice.index, output))
                if self._body.prompt_logprobs is not None:
                    choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
                if self._body.return_token_ids:
                    choice.prompt_token_ids = output.prompt_token_ids
                choices.append(choice)
        return self._answer(choices, self._usage.counts())

    def _chosen(self, output: RequestOutput) -> list[CompletionOutput]:
        """The n completions to return: the best generated ones, by mean log-probability per
        token.
        """
        if not self._gives_tokens:
            logprobs = None if self._body.logprobs is None else []
            return [
                CompletionOutput(index, "", [], logprobs=logprobs, finish_reason="length")
                for index in range(self._n)
            ]
        if len(output.outputs) == self._n:
            return output.outputs

        def mean_logprob(completion: CompletionOutput) -> float:
            assert completion.cumulative_logprob is not None  # routes/completions.py asks for it
            return completion.cumulative_logprob / max(1, len(completion.token_ids))

        best = sorted(output.outputs, key=mean_logprob, reverse=True)[: self._n]
        for index, completion in enumerate(best):
            completion.index = index
        return best

    def _count(self, prompt_index: int, output: RequestOutput) -> None:
        self._usage.add(prompt_index, output)
        if not self._gives_tokens:
            self._usage.completion_tokens = 0

    def _choice(self, prompt_index: int, completion: CompletionOutput) -> CompletionChoice:
        index = prompt_index * self._n + completion.index
        choice = CompletionChoice(
            text=completion.text, index=index, finish_reason=finish_reason(completion)
        )
        if self._body.logprobs is not None:
            choice.logprobs = self._logprobs(index, completion.logprobs)
        if completion.finish_reason is not None:
            choice.stop_reason = completion.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = completion.token_ids
        return choice

    def _logprobs(self, index: int, positions: list[PositionLogprobs] | None) -> CompletionLogprobs:
        start = self._offsets.get(index, 0)
        written, self._offsets[index] = self._writer.completion(
            positions or [], start, skips_special=self._skips_special
        )
        return written

    def _echo(self, prompt_index: int, index: int, output: RequestOutput) -> CompletionChoice:
        """The prompt as the beginning of a choice."""
        tokenizer, text = self._tokenizer, self._jobs[prompt_index].text
        if text is None or self._body.truncate_prompt_tokens is not None:
            text = "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids)
        choice = CompletionChoice(text=text, index=index)
        if self._body.logprobs is not None:
            assert output.prompt_logprobs is not None  # routes/completions.py asks for them
            choice.logprobs = self._writer.prompt(
                output.prompt_token_ids, output.prompt_logprobs, text
            )
        return choice

    def _put_before(self, choice: CompletionChoice, echo: CompletionChoice) -> None:
        if choice.logprobs is not None and echo.logprobs is not None:
            choice.logprobs.text_offset = [
                offset + len(echo.text) for offset in choice.logprobs.text_offset
            ]
            choice.logprobs = joined(echo.logprobs, choice.logprobs)
        choice.text = echo.text + choice.text

    # ------------------------------------------------------------ streamed

    def stream(self) -> EventStream:
        return self._state.event_stream(self._events(), self._call)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        body, options = self._body, self._body.stream_options
        wants_usage = bool(options and options.include_usage)
        counts_always = wants_usage and bool(options.continuous_usage_stats)
        is_plain = body.logprobs is None and not body.return_token_ids and not counts_always
        is_single = is_plain and self._n == 1 and self._gives_tokens
        # Everything that is constant across chunks is encoded once: a chunk of plain text is its
        # text between two constants.
        head = b"data: " + encode(self._head)[:-1] + b',"choices":[{"text":'
        tail = b',"system_fingerprint":' + encode(self._state.system_fingerprint) + b"}\n\n"
        ends: dict[int, bytes] = {}
        begun: set[int] = set()

        def write_down(output: RequestOutput, prompt_index: int = 0) -> bytes:
            if (
                is_single
                and len(output.outputs) == 1
                and (end := ends.get(prompt_index)) is not None
                and output.outputs[0].finish_reason is None
            ):
                # the common case: the next text of the only choice
                completion = output.outputs[0]
                self._usage.completion_tokens += len(completion.token_ids)
                return head + encode(completion.text) + end if completion.text else b""
            self._count(prompt_index, output)
            usage = self._usage.counts() if counts_always else None if wants_usage else UNSET
            chunks = []
            if prompt_index not in begun:
                begun.add(prompt_index)
                chunks += [
                    event(self._answer([choice], usage))
                    for choice in self._beginnings(prompt_index, output)
                ]
            for completion in output.outputs if self._gives_tokens else self._chosen(output):
                if completion.finish_reason is not None or not is_plain:
                    chunks.append(
                        event(self._answer([self._choice(prompt_index, completion)], usage))
                    )
                elif completion.text:
                    index = prompt_index * self._n + completion.index
                    if (end := ends.get(index)) is None:
                        rest = b',"usage":null' if wants_usage else b""
                        end = ends[index] = (
                            b',"index":%d,"logprobs":null,"finish_reason":null}]' % index
                            + rest
                            + tail
                        )
                    chunks.append(head + encode(completion.text) + end)
            return b"".join(chunks)

        async with aclosing(merged(self._runs(write_down))) as outputs:
            async for prompt_index, output in outputs:
                if chunks := write_down(output, prompt_index):
                    yield chunks
        if wants_usage:
            yield event(self._answer([], self._usage.counts()))
        yield DONE

    def _beginnings(self, prompt_index: int, output: RequestOutput) -> list[CompletionChoice]:
        """What a stream sends once per choice, before its first token: the echoed prompt and its
        token ids.
        """
        if not (self._body.echo or self._body.return_token_ids):
            return []
        choices = []
        for index in range(prompt_index * self._n, (prompt_index + 1) * self._n):
            choice = (
                self._echo(prompt_index, index, output)
                if self._body.echo
                else CompletionChoice(text="", index=index)
            )
            self._offsets[index] = len(choice.text)
            if self._body.return_token_ids:
                choice.prompt_token_ids, choice.token_ids = output.prompt_token_ids, []
            choices.append(choice)
        return choices


def finish_reason(completion: CompletionOutput) -> Any:
    """Only values that OpenAI's API defines: an aborted completion has the finish reason
    "length".
    """
    return "length" if completion.finish_reason == "abort" else completion.finish_reason
