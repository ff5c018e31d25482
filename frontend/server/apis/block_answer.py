"""The response of an API that answers with blocks: Anthropic's messages, OpenAI's Responses and
Ollama's chat.

Must not know: an API's names for blocks, how the body was checked, the engine.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, ClassVar

from ..http.call import HttpCall
from ..http.errors import ApiError
from ..http.sse import COMMENT, EVENT_STREAM, EventStream, JsonAnswer
from ..state import ServerState
from ..turns.answer_run import AnswerRun, ChoiceDelta
from ..turns.blocks import AnswerBlocks, BlockEvent
from ..turns.token_logprobs import TokenWriter


class BlockAnswer:
    """The response to one checked body.

    Whole and streamed responses read the same events. A subclass encodes them as they arrive, and
    shows the blocks at the end.
    """

    comment: ClassVar[bytes] = COMMENT
    media_type: ClassVar[bytes] = EVENT_STREAM

    def __init__(self, state: ServerState, call: HttpCall, run: AnswerRun):
        self._state = state
        self._call = call
        self._run = run
        self._blocks = AnswerBlocks()
        self._writer = TokenWriter(run.tokenizer)

    async def respond(self, *, streams: bool | None) -> EventStream | JsonAnswer:
        if streams:
            return self._state.event_stream(
                self._run.written(self._write),
                self._call,
                error_event=self._error_event,
                comment=self._keep_alive,
                media_type=self.media_type,
            )
        last = None
        async with aclosing(self._run.deltas()) as deltas:
            async for last in deltas:
                self._take(last)
        assert last is not None
        return JsonAnswer(self._whole(last))

    def _keep_alive(self) -> bytes:
        """Returns what a silent stream sends."""
        return self.comment

    def _take(self, delta: ChoiceDelta) -> list[BlockEvent]:
        """Adds the delta to the blocks."""
        events = self._blocks.feed(delta.parts)
        return events if delta.finish_reason is None else events + self._blocks.close()

    def _write(self, delta: ChoiceDelta) -> bytes:
        """Returns the piece of a stream."""
        raise NotImplementedError

    def _whole(self, last: ChoiceDelta) -> dict[str, Any]:
        """Returns the whole response, after the last delta."""
        raise NotImplementedError

    def _error_event(self, error: ApiError) -> bytes:
        """Returns the last piece of a stream that fails."""
        raise NotImplementedError
