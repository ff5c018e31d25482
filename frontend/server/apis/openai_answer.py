"""The response of OpenAI's completions and chat: what both have in common, whole and streamed.

Must not know: how the body was checked, the engine.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar

import msgspec
from starlette.responses import Response

from ..http.call import HttpCall
from ..http.sse import DONE, EventStream, around, event, json_of
from ..state import ServerState
from ..turns.answer_run import AnswerRun, ChoiceDelta, FinishedChoice, UsageCounts
from ..turns.token_logprobs import TokenWriter


class OpenAIAnswer:
    """The response to one checked body.

    A subclass makes the choices: of a whole response, and of each chunk of a stream.
    """

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    object_of_chunk: ClassVar[str]
    type: ClassVar[type[msgspec.Struct]]
    type_of_chunk: ClassVar[type[msgspec.Struct]]
    text_path: ClassVar[tuple[str, ...]]  # to the text of a chunk's choice

    def __init__(self, state: ServerState, call: HttpCall, body: Any, model: str, run: AnswerRun):
        self._state = state
        self._call = call
        self._body = body
        self._run = run
        self._writer = TokenWriter(run.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._head = {
            "id": f"{self.id_prefix}-{call.suffix}",
            "created": int(time.time()),
            "model": model,
        }
        self._tail: dict[str, Any] = {"system_fingerprint": state.system_fingerprint}
        options = body.stream_options
        self._wants_usage = bool(options and options.include_usage)
        self._counts_always = self._wants_usage and bool(options.continuous_usage_stats)
        # A chunk of new text has nothing but that text if this is true.
        self._is_plain = (
            run.params.logprobs is None and not body.return_token_ids and not self._counts_always
        )

    def _whole_choices(self, messages: list[FinishedChoice]) -> list[Any]:
        raise NotImplementedError

    def _usage(self) -> UsageCounts:
        return self._run.usage.counts()

    def _beginning(self, index: int) -> bytes:
        """Returns the chunks before a choice's first token."""
        raise NotImplementedError

    def _choices(self, delta: ChoiceDelta) -> list[Any]:
        """Returns what is sent of a choice's new output, one chunk each."""
        raise NotImplementedError

    def _text_choice(self, index: int, text: str) -> Any:
        """Returns what is sent of a choice of which only text is new."""
        raise NotImplementedError

    # ------------------------------------------------------------ whole

    async def respond(self) -> EventStream | Response:
        return self.stream() if self._body.stream else await self.whole()

    async def whole(self) -> Response:
        messages = await self._run.messages()
        num_positions = sum(len(message.logprobs or []) for message in messages) + sum(
            len(output.prompt_logprobs or []) for output in self._run.outputs.values()
        )
        num_candidates = 1 + max(0, self._run.params.logprobs or 0)
        return await json_of(lambda: self._completion(messages), num_positions * num_candidates)

    def _completion(self, messages: list[FinishedChoice]) -> Any:
        return self.type(
            **self._head,
            object=self.object,
            choices=self._whole_choices(messages),
            usage=self._usage(),
            **self._tail,
        )

    # ------------------------------------------------------------ streamed

    def stream(self) -> EventStream:
        return self._state.event_stream(self._events(), self._call)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        begun: set[int] = set()
        around_text: dict[int, tuple[bytes, bytes]] = {}

        def write(delta: ChoiceDelta) -> bytes:
            beginning = b""
            if delta.index not in begun:
                begun.add(delta.index)
                beginning = self._beginning(delta.index)
                if self._is_plain:
                    around_text[delta.index] = self._around_text(delta.index)
            return beginning + b"".join([self._chunk([choice]) for choice in self._choices(delta)])

        async with aclosing(self._run.written(write, around_text)) as chunks:
            async for chunk in chunks:
                yield chunk
        if self._wants_usage:
            yield self._chunk([], usage=self._usage())
        yield DONE

    def _chunk(self, choices: list[Any], **fields: Any) -> bytes:
        return event(self._chunk_of(choices, **fields))

    def _chunk_of(self, choices: list[Any], **fields: Any) -> msgspec.Struct:
        if self._counts_always:
            fields["usage"] = self._usage()
        elif self._wants_usage:
            fields.setdefault("usage", None)
        return self.type_of_chunk(
            **self._head, object=self.object_of_chunk, choices=choices, **self._tail, **fields
        )

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """Returns the two constants between which a chunk of plain text has its text."""
        chunk = self._chunk_of([self._text_choice(index, "")])
        before, after = around(chunk, ("choices", 0, *self.text_path))
        return b"data: " + before, after + b"\n\n"
