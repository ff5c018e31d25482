"""The response of /v1/responses, whole or as OpenAI's events.

Must not know: how the body was checked, templates, the engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ...outputs import PositionLogprobs
from ..http.call import Call
from ..http.errors import ApiError
from ..http.sse import named_event
from ..state import ServerState
from ..turns.answer_run import AnswerRun, ChoiceDelta
from ..turns.blocks import CALL, DELTA, REASONING, START, STOP, TEXT, Block, BlockEvent
from ..turns.token_logprobs import TokenLogprob
from .block_answer import BlockAnswer
from .responses_turn import ResponsesBody

PREFIXES = {TEXT: "msg", REASONING: "rs", CALL: "fc"}


def new_response_id() -> str:
    """A random id. It does not derive from the request id, which the client may choose: a stored
    response must not be overwritten.
    """
    return f"resp_{secrets.token_hex(24)}"


class ResponsesAnswer(BlockAnswer):
    """The response to one checked body.

    `keep` is called with the complete response before it is sent.
    """

    def __init__(
        self,
        state: ServerState,
        call: Call,
        body: ResponsesBody,
        model: str,
        run: AnswerRun,
        keep: Callable[[dict[str, Any]], None],
    ):
        super().__init__(state, call, run)
        self._keep = keep
        self._statuses: list[str] = []  # of the blocks that have ended
        self._num_events = 0
        self._unsaid: list[PositionLogprobs] = []  # of tokens whose text has not arrived yet
        self._new_logprobs: list[TokenLogprob] = []  # of the next text delta
        self._logprobs: dict[int, list[TokenLogprob]] = {}  # of each text block
        self._head = _head(body, model, run)
        self._suffix = self._head["id"].removeprefix("resp_")

    # ------------------------------------------------------------ outputs of the engine

    def _take(self, delta: ChoiceDelta) -> list[BlockEvent]:
        events = self._blocks.feed(delta.parts)
        if delta.finish_reason is not None:
            if not self._blocks.blocks:
                # clients expect a message, even an empty one
                events += self._blocks.begin(TEXT)
            events += self._blocks.close()
        if self._run.params.logprobs is not None:
            self._take_logprobs(delta, events)
        ended = [block for what, block, _ in events if what == STOP]
        self._statuses += ["completed"] * len(ended)
        if ended and delta.finish_reason in ("length", "timeout"):
            self._statuses[-1] = "incomplete"
        return events

    def _take_logprobs(self, delta: ChoiceDelta, events: list[BlockEvent]) -> None:
        """In this API only text has log-probabilities.

        Tokens without text, such as an end of sequence, are added to the text before them.
        """
        self._unsaid += delta.logprobs or []
        block = next(
            (block for what, block, _ in events if what == DELTA and block.kind == TEXT), None
        )
        if (
            block is None
            and delta.finish_reason is not None
            and self._unsaid
            and self._blocks.blocks[-1].kind == TEXT
        ):
            block = self._blocks.blocks[-1]
            events.insert(-1, (DELTA, block, ""))
        if block is not None:
            self._new_logprobs = self._writer.chat(self._unsaid, self._run.params.logprobs or 0)
            self._logprobs.setdefault(block.index, []).extend(self._new_logprobs)
        if events:
            self._unsaid = []

    def _whole(self, last: ChoiceDelta) -> dict[str, Any]:
        """The final response object."""
        output = [
            self._item(block, status)
            for block, status in zip(self._blocks.blocks, self._statuses, strict=True)
        ]
        end: dict[str, Any] = {"status": "completed", "completed_at": int(time.time())}
        if last.finish_reason in ("length", "timeout"):
            end = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        response = self._head | end | {"output": output, "usage": self._usage()}
        self._keep(response)
        return response

    def _usage(self) -> dict[str, Any]:
        usage = self._run.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    # ------------------------------------------------------------ items

    def _item_id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self._suffix}{block.index:04x}"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._item_id(block), "status": status}
        if block.kind == TEXT:
            return head | {"type": "message", "role": "assistant", "content": [self._part(block)]}
        if block.kind == REASONING:
            return head | {
                "type": "reasoning",
                "summary": [],
                "content": [self._part(block)],
                "encrypted_content": None,
            }
        call_id = f"call_{self._suffix}{block.index:04x}"
        return head | {
            "type": "function_call",
            "call_id": call_id,
            "name": block.name,
            "arguments": block.text,
        }

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == REASONING:
            return {"type": "reasoning_text", "text": block.text}
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": self._logprobs.get(block.index, []),
        }

    # ------------------------------------------------------------ events

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(kind, {"type": kind, "sequence_number": number, **fields})

    def _write(self, delta: ChoiceDelta) -> bytes:
        chunks = []
        if not self._num_events:
            chunks = [
                self._event(f"response.{kind}", response=self._head)
                for kind in ("created", "in_progress")
            ]
        num_ended = len(self._statuses)
        for what, block, text in self._take(delta):
            if what == START:
                chunks.append(self._started(block))
            elif what == DELTA:
                chunks.append(self._delta(block, text))
            else:
                chunks.append(self._stopped(block, self._statuses[num_ended]))
                num_ended += 1
        if delta.finish_reason is not None:
            response = self._whole(delta)
            chunks.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(chunks)

    def _started(self, block: Block) -> bytes:
        empty = Block(block.kind, block.index, block.name)
        item = self._item(empty, "in_progress")
        if block.kind == CALL:
            return self._event("response.output_item.added", output_index=block.index, item=item)
        added = self._event(
            "response.output_item.added", output_index=block.index, item=item | {"content": []}
        )
        return added + self._event(
            "response.content_part.added",
            **self._place(block),
            part=self._part(empty) | ({"logprobs": []} if block.kind == TEXT else {}),
        )

    def _delta(self, block: Block, text: str) -> bytes:
        if block.kind == CALL:
            place = {"item_id": self._item_id(block), "output_index": block.index}
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        if block.kind == REASONING:
            return self._event("response.reasoning_text.delta", **self._place(block), delta=text)
        logprobs, self._new_logprobs = self._new_logprobs, []
        return self._event(
            "response.output_text.delta", **self._place(block), delta=text, logprobs=logprobs
        )

    def _stopped(self, block: Block, status: str) -> bytes:
        place, text = self._place(block), block.text
        if block.kind == CALL:
            place.pop("content_index")
            done = self._event(
                "response.function_call_arguments.done", **place, name=block.name, arguments=text
            )
        else:
            kind, more = (
                ("reasoning_text", {})
                if block.kind == REASONING
                else ("output_text", {"logprobs": self._logprobs.get(block.index, [])})
            )
            done = self._event(f"response.{kind}.done", **place, text=text, **more)
            done += self._event("response.content_part.done", **place, part=self._part(block))
        return done + self._event(
            "response.output_item.done", output_index=block.index, item=self._item(block, status)
        )

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": block.index, "content_index": 0}

    def _error_event(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        output = [self._item(block, "incomplete") for block in self._blocks.blocks]
        response = self._head | {
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "output": output,
        }
        return self._event("response.failed", response=response)


def _head(body: ResponsesBody, model: str, run: AnswerRun) -> dict[str, Any]:
    """The initial response object: the request's parameters as the server applies them."""
    params, text = run.params, body.text
    return {
        "id": run.jobs[0].request_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": params.temperature,
        "text": {
            "format": msgspec.to_builtins(text.format)
            if text and text.format
            else {"type": "text"},
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
        "tools": [
            msgspec.to_builtins(tool) | {"strict": bool(tool.strict)} for tool in body.tools or []
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
