"""The response of /v1/responses, whole or as OpenAI's events.

Must not know: how the body was checked, templates, the engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from ....ipc.params import SamplingParams
from ...outputs import PositionLogprobs
from ..http.call import HttpCall
from ..http.errors import ApiError
from ..http.sse import named_event
from ..state import ServerState
from ..turns.answer_run import AnswerRun, ChoiceDelta, TokenUsage
from ..turns.blocks import CALL, DELTA, REASONING, START, STOP, TEXT, AnswerBlock, BlockEvent
from ..turns.token_logprobs import TokenLogprob
from .block_answer import BlockAnswer
from .responses_items import SUMMARY_MARK, Item
from .responses_tools import CheckedTools, ToolOrigin, custom_input, shown_tool
from .responses_turn import ResponsesBody

PREFIXES = {TEXT: "msg", REASONING: "rs"}
CALL_PREFIXES = {"function": "fc", "custom": "ctc"}


def new_response_id() -> str:
    """Returns a random id. It does not derive from the request id, which the client may choose: a
    stored response must not be overwritten.
    """
    return f"resp_{secrets.token_hex(24)}"


class ResponsesAnswer(BlockAnswer):
    """The response to one checked body.

    `keep` is called with the complete response before it is sent.
    """

    def __init__(
        self,
        state: ServerState,
        call: HttpCall,
        body: ResponsesBody,
        model: str,
        run: AnswerRun,
        tools: CheckedTools,
        keep: Callable[[dict[str, Any]], None],
    ):
        super().__init__(state, call, run)
        self._tools = tools
        self._keep = keep
        self._statuses: list[str] = []  # of the blocks that have ended
        self._num_events = 0
        self._unsent: list[PositionLogprobs] = []  # of tokens whose text has not arrived yet
        self._new_logprobs: list[TokenLogprob] = []  # of the next text delta
        self._logprobs: dict[int, list[TokenLogprob]] = {}  # of each text block
        self._head = head_of(body, model, run.jobs[0].request_id, run.params)
        self._suffix = self._head["id"].removeprefix("resp_")

    # ------------------------------------------------------------ outputs of the engine

    def _take(self, delta: ChoiceDelta) -> list[BlockEvent]:
        events = self._blocks.feed(delta.parts)
        if delta.finish_reason is not None:
            if not self._blocks.blocks:
                # Clients expect a message, even an empty one.
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
        """Takes the log-probabilities of new tokens. In this API only text has log-probabilities.

        Tokens without text, such as an end of sequence, are added to the text before them.
        """
        self._unsent += delta.logprobs or []
        block = next(
            (block for what, block, _ in events if what == DELTA and block.kind == TEXT), None
        )
        if (
            block is None
            and delta.finish_reason is not None
            and self._unsent
            and self._blocks.blocks[-1].kind == TEXT
        ):
            block = self._blocks.blocks[-1]
            events.insert(-1, (DELTA, block, ""))
        if block is not None:
            self._new_logprobs = self._writer.chat(self._unsent, self._run.params.logprobs or 0)
            self._logprobs.setdefault(block.index, []).extend(self._new_logprobs)
        if events:
            self._unsent = []

    def _whole(self, last: ChoiceDelta) -> dict[str, Any]:
        """Returns the final response object."""
        output = [
            self._item(block, status)
            for block, status in zip(self._blocks.blocks, self._statuses, strict=True)
        ]
        end: dict[str, Any] = {"status": "completed", "completed_at": int(time.time())}
        if last.finish_reason in ("length", "timeout"):
            end = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        response = self._head | end | {"output": output, "usage": _usage_object(self._run.usage)}
        self._keep(response)
        return response

    # ------------------------------------------------------------ items

    def _item_id(self, block: AnswerBlock) -> str:
        prefix = PREFIXES.get(block.kind) or CALL_PREFIXES[self._origin(block).type]
        return f"{prefix}_{self._suffix}{block.index:04x}"

    def _origin(self, block: AnswerBlock) -> ToolOrigin:
        return self._tools.origin_of(block.name)

    def _item(self, block: AnswerBlock, status: str) -> dict[str, Any]:
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
        origin = self._origin(block)
        call = {
            "call_id": block.call_id or f"call_{self._suffix}{block.index:04x}",
            "name": origin.name,
        }
        if origin.namespace:
            call["namespace"] = origin.namespace
        if origin.type == "custom":
            return head | {"type": "custom_tool_call", **call, "input": custom_input(block.text)}
        return head | {"type": "function_call", **call, "arguments": block.text}

    def _part(self, block: AnswerBlock) -> dict[str, Any]:
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

    def _keep_alive(self) -> bytes:
        """Returns an event, as in OpenAI's API: a client that waits for events does not count
        comments. Clients of this API require another event as the first.
        """
        return self._event("keepalive") if self._num_events else self.comment

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
                if block.kind != CALL or self._origin(block).type != "custom":
                    chunks.append(self._delta(block, text))
            else:
                chunks.append(self._stopped(block, self._statuses[num_ended]))
                num_ended += 1
        if delta.finish_reason is not None:
            response = self._whole(delta)
            chunks.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(chunks)

    def _started(self, block: AnswerBlock) -> bytes:
        empty = AnswerBlock(block.kind, block.index, block.name, block.call_id)
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

    def _delta(self, block: AnswerBlock, text: str) -> bytes:
        if block.kind == CALL:
            place = {"item_id": self._item_id(block), "output_index": block.index}
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        if block.kind == REASONING:
            return self._event("response.reasoning_text.delta", **self._place(block), delta=text)
        logprobs, self._new_logprobs = self._new_logprobs, []
        return self._event(
            "response.output_text.delta", **self._place(block), delta=text, logprobs=logprobs
        )

    def _stopped(self, block: AnswerBlock, status: str) -> bytes:
        place, text = self._place(block), block.text
        if block.kind == CALL:
            place.pop("content_index")
            done = self._call_done(block, place)
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

    def _call_done(self, block: AnswerBlock, place: dict[str, Any]) -> bytes:
        """Ends a call. A custom tool's text is sent at once: it arrived as JSON."""
        origin = self._origin(block)
        if origin.type != "custom":
            return self._event(
                "response.function_call_arguments.done",
                **place,
                name=origin.name,
                arguments=block.text,
            )
        kind, text = "response.custom_tool_call_input", custom_input(block.text)
        delta = self._event(f"{kind}.delta", **place, delta=text)
        return delta + self._event(f"{kind}.done", **place, input=text)

    def _place(self, block: AnswerBlock) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": block.index, "content_index": 0}

    def _error_event(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that fails."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        output = [self._item(block, "incomplete") for block in self._blocks.blocks]
        response = self._head | {
            "status": "failed",
            "error": {"code": code, "message": error.message},
            "output": output,
        }
        return self._event("response.failed", response=response)


async def without_generation(head: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """Yields the events of a response without any output, of which `whole_without_generation` is
    last.
    """
    whole = whole_without_generation(head)
    for number, (kind, response) in enumerate((("created", head), ("completed", whole))):
        kind = f"response.{kind}"
        yield named_event(kind, {"type": kind, "sequence_number": number, "response": response})


def whole_without_generation(head: dict[str, Any]) -> dict[str, Any]:
    return head | {
        "status": "completed",
        "completed_at": int(time.time()),
        "usage": _usage_object(TokenUsage()),
    }


def compacted(
    request_id: str, items: list[Item], summary: str, usage: TokenUsage
) -> dict[str, Any]:
    """Returns OpenAI's compaction of a conversation, which the client sends in its place. Earlier
    summaries are part of the new one.
    """
    said = [item for item in items if item.type == "message" and item.role == "user"]
    compaction = {
        "id": f"cmp_{secrets.token_hex(16)}",
        "type": "compaction",
        "encrypted_content": SUMMARY_MARK + summary,
    }
    return {
        "id": request_id,
        "object": "response.compaction",
        "created_at": int(time.time()),
        "output": [*msgspec.to_builtins(said), compaction],
        "usage": _usage_object(usage),
    }


def _usage_object(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def head_of(
    body: ResponsesBody, model: str, request_id: str, params: SamplingParams
) -> dict[str, Any]:
    """Returns the initial response object: the request's parameters as the server applies them."""
    text = body.text
    return {
        "id": request_id,
        "object": "response",
        "created_at": int(time.time()),
        "conversation": {"id": body.conversation_id} if body.conversation is not None else None,
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
        "tools": [shown_tool(tool) for tool in body.tools or []],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
