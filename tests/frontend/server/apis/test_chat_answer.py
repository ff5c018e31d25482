"""OpenAI's chat answers from parts: tool calls and reasoning, whole and streamed, accumulated like
in a client.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from quire.frontend.answer_format import (
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    detect,
)
from quire.frontend.server.apis.chat_answer import ChatAnswer
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.routes.chat import ChatBody
from quire.frontend.server.turns.answer_run import AnswerRun, ChoiceDelta
from quire.frontend.server.turns.generation import GenerationJob
from quire.ipc.params import SamplingParams

STEPS = [
    [Reasoning("let ")],
    [Reasoning("me see")],
    [Content("I "), Content("call")],
    [],
    [ToolCallStart(0, "add")],
    [ToolCallArguments(0, '{"a":')],
    [ToolCallArguments(0, " 1}"), ToolCallStart(1, "sub"), ToolCallArguments(1, "{}")],
]


class ScriptedRun(AnswerRun):
    """Says STEPS."""

    def __init__(self, state: Any, call: HttpCall, steps: list[list[Any]]):
        super().__init__(
            state, call, [GenerationJob("r", [1, 2], SamplingParams())], detect(None).parser
        )
        self._steps = steps

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        for i, parts in enumerate(self._steps):
            self.usage.completion_tokens += 1
            reason = "tool_calls" if i == len(self._steps) - 1 else None
            yield ChoiceDelta(0, list(parts), [i], finish_reason=reason)

    async def written(
        self, write: Callable[[ChoiceDelta], bytes], around_text: object = None
    ) -> AsyncIterator[bytes]:
        async for delta in self.deltas():
            yield write(delta)


def answer_to(steps: list[list[Any]] = STEPS, **fields: Any) -> tuple[dict, list[dict]]:
    """Return (the whole answer, the chunks of the stream)."""

    async def run() -> tuple[dict, list[dict]]:
        call = HttpCall("req-abc", 0.0, asyncio.current_task())
        state = SimpleNamespace(
            ready_engine=lambda: SimpleNamespace(tokenizer=None), system_fingerprint="fp_1"
        )
        run = ScriptedRun(state, call, steps)
        whole = await ChatAnswer(state, call, ChatBody(messages=[], **fields), "m", run).whole()
        body = ChatBody(messages=[], stream=True, **fields)
        stream = ChatAnswer(state, call, body, "m", run)
        raw = b"".join([event async for event in stream._events()]).decode()
        lines = raw.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return json.loads(whole.body), [
            json.loads(line.removeprefix("data: ")) for line in lines[:-2]
        ]

    return asyncio.run(run())


def accumulate(chunks: list[dict]) -> dict:
    """Accumulate chunks like OpenAI's clients."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        for key in ("content", "reasoning_content"):
            message[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert (
                    call["id"].startswith("call_")
                    and call["type"] == "function"
                    and call["function"]["name"]
                )
                message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert set(call) == {"index", "function"}
            message["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
    return message


def test_a_stream_accumulates_to_the_whole_answer() -> None:
    whole, chunks = answer_to()
    said = whole["choices"][0]["message"]
    streamed = accumulate(chunks)
    assert streamed["content"] == said["content"] == "I call"
    assert (
        streamed["reasoning_content"]
        == said["reasoning_content"]
        == said["reasoning"]
        == "let me see"
    )
    calls = [call["function"] for call in said["tool_calls"]]
    assert (
        streamed["tool_calls"]
        == calls
        == [{"name": "add", "arguments": '{"a": 1}'}, {"name": "sub", "arguments": "{}"}]
    )
    assert len({call["id"] for call in said["tool_calls"]}) == 2 and {
        call["type"] for call in said["tool_calls"]
    } == {"function"}
    assert (
        whole["choices"][0]["finish_reason"]
        == chunks[-1]["choices"][0]["finish_reason"]
        == "tool_calls"
    )
    assert whole["id"] == chunks[0]["id"] == "chatcmpl-abc"


def test_the_role_comes_first_and_once() -> None:
    deltas = [chunk["choices"][0]["delta"] for chunk in answer_to()[1]]
    assert (
        deltas[0]["role"] == "assistant"
        and not any("role" in delta for delta in deltas[1:])
        and deltas[-1] == {}
    )


def test_reasoning_can_be_left_out() -> None:
    whole, chunks = answer_to(include_reasoning=False)
    assert (
        "reasoning_content" not in whole["choices"][0]["message"]
        and accumulate(chunks)["reasoning_content"] == ""
    )


def test_calls_without_text_have_no_content() -> None:
    whole, _ = answer_to([[ToolCallStart(0, "add")], [ToolCallArguments(0, "{}")]])
    assert whole["choices"][0]["message"]["content"] is None
    assert answer_to([[]])[0]["choices"][0]["message"]["content"] == ""


def test_token_ids_are_sent_even_without_a_part() -> None:
    whole, chunks = answer_to(return_token_ids=True)
    assert (
        [i for c in chunks for i in c["choices"][0].get("token_ids", [])]
        == whole["choices"][0]["token_ids"]
        == list(range(len(STEPS)))
    )
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"] == [1, 2]


def test_plain_chunks_have_the_fields_of_all_others() -> None:
    plain, mixed = (
        answer_to([[Content("a")], [Content("b")]]),
        answer_to([[Content("a"), Content("b")]]),
    )
    for index in (0, 1):
        keys = [list(chunk) for chunk in plain[1]], [list(chunk) for chunk in mixed[1]]
        assert {tuple(k) for k in keys[0]} == {tuple(k) for k in keys[1]}
    assert [list(c["choices"][0]) for c in plain[1][1:3]] == [list(mixed[1][1]["choices"][0])] * 2
