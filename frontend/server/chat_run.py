"""One turn of a conversation: rendered, run, and its text parsed into content, reasoning and tool
calls.

Must not know: the API of the request. OpenAI's chat, Responses, Anthropic's messages and Ollama's
chat only encode these events.

    ChatTurn ──prepare_chat──▶ ChatRun ──news()──▶ [ChoiceNews, ...] per step ──▶ events of each API
                                       └─messages()──▶ [Message, ...], the whole response
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from ...ipc.params import SamplingParams
from ..answer_format import (
    Answer,
    AnswerFormat,
    AnswerParser,
    Content,
    Part,
    Reasoning,
    ToolCallStart,
    collect,
)
from ..outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from ..text.chat_template import ChatTemplateTimeError
from .generation import Job, check_context, check_room, run
from .http.call import Call
from .http.errors import invalid
from .state import ServerState
from .tokenizing import LONG_TEXT, check_num_characters, tokenize_all
from .usage import Usage

# Seconds of processor time that a chat template may take on the event loop.
INLINE_S = 0.05


@dataclass(slots=True)
class ChatTurn:
    """The parameters of a chat request in one form for all APIs.

    `tool_choice`: "auto", "none", "required" or the name of a function as {"name": ...}.
    """

    request_id: str
    messages: list[dict[str, Any]]
    params: SamplingParams
    max_tokens: int | None = None  # explicit limit; rejected if it exceeds the context
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    template_variables: dict[str, Any] = field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    priority: int = 0
    cache_salt: str | None = None
    names: dict[str, str] = field(default_factory=lambda: {"prompt": "messages"})
    compact_json: bool = False  # for call arguments constrained by a grammar

    @property
    def wants_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


def thinking_variables(
    state: ServerState, call: Call, enabled: bool | None, effort: str | None, names: tuple[str, str]
) -> dict[str, Any]:
    """The template variables for a model's optional reasoning and its effort; None: the template's
    default.

    `names`: the two fields of the body; a field that the template does not support is noted as
    ignored.
    """
    template = state.template_text
    variables: dict[str, Any] = {}
    if enabled is not None:
        variables = {name: enabled for name in ("enable_thinking", "thinking") if name in template}
        if not variables and (enabled or state.answer_format.reasoning_marks is not None):
            call.ignored_params.append(names[0])
    if effort is not None and "reasoning_effort" in template:
        variables["reasoning_effort"] = effort
    elif effort is not None and names[1] not in call.ignored_params:
        call.ignored_params.append(names[1])
    return variables


@dataclass(slots=True)
class ChoiceNews:
    """New output of one choice.

    `finish_reason`: "stop", "length", "tool_calls", or None while the choice is unfinished.
    """

    index: int
    parts: list[Part]
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class Message:
    """A whole response, assembled from its ChoiceNews."""

    parts: list[Part] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[PositionLogprobs] | None = None
    token_ids: list[int] = field(default_factory=list)

    def add(self, news: ChoiceNews) -> None:
        self.parts += news.parts
        self.token_ids += news.token_ids
        if news.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += news.logprobs
        self.finish_reason, self.stop_reason = news.finish_reason, news.stop_reason

    def answer(self) -> Answer:
        return collect(self.parts)


async def prepare_chat(state: ServerState, call: Call, turn: ChatTurn) -> ChatRun:
    """Renders, tokenizes and checks a turn.

    Raises ApiError or InvalidParameterError before the engine is called.
    """
    format, params = state.answer_format, turn.params
    text, token_ids = await render_turn(
        state, call, turn, must_fit=turn.params.truncate_prompt_tokens is None
    )
    if not format.skip_special_tokens:
        params = msgspec.structs.replace(params, skip_special_tokens=False)

    check_context(state, token_ids, params, turn.names)
    check_room(state, token_ids, turn.max_tokens, turn.names)
    tools = turn.tools if turn.wants_tools else None
    params, names = shape_answer(format, turn, params, text, call)
    job = Job(turn.request_id, token_ids, params, text, turn.priority, turn.cache_salt, names)
    parsers = [
        format.parser(tools, prompt_text=text, parallel_tool_calls=turn.parallel_tool_calls)
        for _ in range(params.n)
    ]
    return ChatRun(state, call, job, parsers)


def shape_answer(
    format: AnswerFormat, turn: ChatTurn, params: SamplingParams, text: str, call: Call
) -> tuple[SamplingParams, dict[str, str]]:
    """The parameters with the grammar that the turn requires, and the names of fields for errors of
    that grammar.
    """
    asked, options = (
        params.structured_outputs,
        {
            "parallel_tool_calls": turn.parallel_tool_calls,
            "prompt_text": text,
            "compact_json": turn.compact_json,
        },
    )
    tools = (turn.tools or []) if turn.wants_tools else []
    shape = format.forced(tools, turn.tool_choice, **options) if tools else None
    if shape is None and asked is not None:
        shape = format.after_reasoning(asked, tools=tools, **options)
        return msgspec.structs.replace(params, structured_outputs=shape), turn.names
    if shape is None:
        shape = format.strict(tools, **options)
    if shape is None:
        if any(tool["function"].get("strict") for tool in tools):
            # No marker shows where this model's calls begin.
            call.ignored_params.append(turn.names.get("strict", "tools.strict"))
        return params, turn.names
    return msgspec.structs.replace(params, structured_outputs=shape), turn.names | {
        "structured_outputs": "tools",
        "structured_outputs.grammar": "tools",
    }


def shown_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """The tool as the model sees it, without `strict`, which concerns only the server."""
    return {
        **tool,
        "function": {key: value for key, value in tool["function"].items() if key != "strict"},
    }


async def render_turn(
    state: ServerState, call: Call, turn: ChatTurn, *, must_fit: bool = False
) -> tuple[str, list[int]]:
    """The prompt of a turn as text and as token ids.

    Raises ApiError 400: with `must_fit` for a prompt that certainly exceeds the model's context,
    else for one that exceeds the limit of tokenizing.py.
    """
    tokenizer = state.ready_engine().tokenizer
    if tokenizer is None:
        raise invalid(
            turn.names["prompt"], "This model has no tokenizer, so it does not support chat."
        )
    if turn.wants_tools:
        state.answer_format.require_tools()

    def render() -> str:
        text = tokenizer.apply_chat_template(
            turn.messages,
            tools=[shown_tool(tool) for tool in turn.tools or ()] if turn.wants_tools else None,
            documents=turn.documents,
            chat_template=state.chat_template,
            add_generation_prompt=turn.add_generation_prompt,
            continue_final_message=turn.continue_final_message,
            tokenize=False,
            **(state.server_config.chat_template_kwargs | turn.template_variables),
        )
        assert isinstance(text, str)  # tokenize=False
        return text

    num_characters = sum(
        len(m["content"])
        for m in turn.messages
        if isinstance(m, dict) and isinstance(m.get("content"), str)
    )
    if not must_fit:
        check_num_characters(num_characters, turn.names["prompt"], state.max_model_len)
    is_long = num_characters + 100 * (len(turn.messages) + len(turn.tools or ())) >= LONG_TEXT
    text = None if is_long else _render_at_once(render)
    if text is None:
        text = await asyncio.to_thread(render)
    [token_ids] = await tokenize_all(
        state,
        call,
        [text],
        add_special_tokens=False,
        param=turn.names["prompt"],
        must_fit=must_fit,
    )
    return text, token_ids


def _render_at_once(render: Callable[[], str]) -> str | None:
    """The text, or None if the template takes so long that it would block the event loop."""
    from ..text.template_sandbox import time_limit  # imports jinja2

    try:
        with time_limit(INLINE_S):
            return render()
    except ChatTemplateTimeError:
        return None


class ChatRun:
    """A checked turn that can be run once. `usage` is updated while `news` is read."""

    def __init__(self, state: ServerState, call: Call, job: Job, parsers: list[AnswerParser]):
        self._state = state
        self._call = call
        self._job = job
        self._parsers = parsers
        self._has_calls = [False] * len(parsers)
        self._reasonings = [Reasoned() for _ in parsers]
        self._tokenizer = state.ready_engine().tokenizer
        self.usage = Usage()
        self.metrics: RequestMetrics | None = None  # set when `news` has begun
        # set when `news` has begun
        self.prompt_logprobs: list[PositionLogprobs | None] | None = None

    @property
    def request_id(self) -> str:
        return self._job.request_id

    @property
    def params(self) -> SamplingParams:
        return self._job.params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._job.token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._job.token_ids

    async def news(
        self,
        write_down: Callable[[list[ChoiceNews]], bytes] | None = None,
        write_text: Callable[[str], bytes] | None = None,
    ) -> AsyncGenerator[list[ChoiceNews], None]:
        """The new output of each step.

        `write_down` encodes it as a piece of a stream: output that can be written at once is then
        not yielded. `write_text` encodes the most common case with less overhead: content of the
        only choice, and nothing else.
        """
        parser, reasoned = self._parsers[0], self._reasonings[0]
        if len(self._parsers) > 1:
            write_text = None

        def taken_down(output: RequestOutput) -> bytes:
            completion = output.outputs[0]
            if (
                write_text is not None
                and completion.text
                and completion.finish_reason is None
                and parser.is_plain
            ):
                num_tokens = len(completion.token_ids)
                reasoned.is_over = True
                reasoned.num_tokens += num_tokens
                self.usage.completion_tokens += num_tokens
                return write_text(completion.text)
            assert write_down is not None
            return write_down(self._read_output(output))

        at_once = None if write_down is None else partial(self._call.push, taken_down)
        async with aclosing(run(self._state, self._call, self._job, at_once)) as outputs:
            async for output in outputs:
                yield self._read_output(output)

    def _read_output(self, output: RequestOutput) -> list[ChoiceNews]:
        self.usage.add(0, output)
        self.metrics = output.metrics
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        return [self._read(completion) for completion in output.outputs]

    def _read(self, completion: CompletionOutput) -> ChoiceNews:
        index, reason = completion.index, completion.finish_reason
        parser, reasoned = self._parsers[index], self._reasonings[index]
        parts = parser.feed(completion.text) if completion.text else []
        if reason is not None:
            parts = [*parts, *parser.finish()]
        for part in parts:
            if isinstance(part, Content):
                reasoned.is_over = True
            elif isinstance(part, Reasoning):
                reasoned.texts.append(part.text)
            elif isinstance(part, ToolCallStart):
                self._has_calls[index] = reasoned.is_over = True
        reasoned.num_tokens += len(completion.token_ids)
        if reason is not None:
            self._count_reasoning(reasoned)
            if reason == "stop" and self._has_calls[index]:
                reason = "tool_calls"
            elif reason == "abort":  # by a pause, for example: the output is truncated
                reason = "length"
        return ChoiceNews(
            index, parts, completion.token_ids, completion.logprobs, reason, completion.stop_reason
        )

    def _count_reasoning(self, reasoned: Reasoned) -> None:
        """Counts the tokens of the reasoning text as the tokenizer encodes it, so that the count is
        the same for whole and streamed responses.
        """
        if not reasoned.texts:
            return
        if reasoned.is_over:
            assert self._tokenizer is not None
            token_ids = self._tokenizer.encode("".join(reasoned.texts), False)
            self.usage.reasoning_tokens += min(len(token_ids), reasoned.num_tokens)
        else:
            self.usage.reasoning_tokens += reasoned.num_tokens

    async def messages(self) -> list[Message]:
        """The whole responses, one per choice."""
        found = [Message() for _ in self._parsers]
        async with aclosing(self.news()) as steps:
            async for step in steps:
                for news in step:
                    found[news.index].add(news)
        return found


@dataclass(slots=True)
class Reasoned:
    """Reasoning of one choice so far. `is_over`: content or a call has begun."""

    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0  # of the whole choice
    is_over: bool = False
