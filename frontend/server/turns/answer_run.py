"""A checked request that runs once: the engine's outputs as events of each choice, the same for
every API, streamed or whole.

Must not know: the API of the request. Its answer only encodes these events.

    [GenerationJob, ...] ──▶ AnswerRun
        ──deltas()──▶ ChoiceDelta, ...          each choice's new output
        ──written()──▶ bytes, ...               the same, encoded by the API
        ──messages()──▶ [FinishedChoice, ...]   the same, put together
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ....ipc.params import SamplingParams
from ...answer_format import (
    AnswerParser,
    Content,
    ParsedAnswer,
    Part,
    Reasoning,
    ToolCallStart,
    collect,
)
from ...outputs import CompletionOutput, PositionLogprobs, RequestMetrics, RequestOutput
from ..http.call import HttpCall
from ..http.sse import encode
from ..state import ServerState
from .generation import GenerationJob, merged, run


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class UsageCounts(msgspec.Struct):
    """OpenAI's usage object."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


@dataclass(slots=True)
class TokenUsage:
    """Counts over the outputs of one call; prompts are identified by their index."""

    completion_tokens: int = 0
    reasoning_tokens: int = 0
    num_cached_tokens: dict[int, int] = field(default_factory=dict)  # where it is known
    _num_prompt_tokens: dict[int, int] = field(default_factory=dict)

    def add_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        self._num_prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        if output.num_cached_tokens is not None:
            self.num_cached_tokens[prompt_index] = output.num_cached_tokens

    @property
    def prompt_tokens(self) -> int:
        return sum(self._num_prompt_tokens.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self.num_cached_tokens.values())

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def counts(self) -> UsageCounts:
        return UsageCounts(
            self.prompt_tokens,
            self.completion_tokens,
            self.total_tokens,
            PromptTokensDetails(self.cached_tokens),
            CompletionTokensDetails(self.reasoning_tokens),
        )


@dataclass(slots=True)
class ChoiceDelta:
    """New output of one choice.

    `finish_reason` is "stop", "length", "timeout", "tool_calls", or None while the choice is
    unfinished.
    """

    index: int
    parts: list[Part]
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class FinishedChoice(ChoiceDelta):
    """A whole choice, assembled from its deltas."""

    index: int = 0
    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add(self, delta: ChoiceDelta) -> None:
        self.parts += delta.parts
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def answer(self) -> ParsedAnswer:
        return collect(self.parts)


@dataclass(slots=True)
class ChoiceState:
    """The state of one choice as read so far. `has_begun` tells that content or a call has followed
    reasoning.
    """

    parser: AnswerParser
    reasonings: list[str] = field(default_factory=list)
    num_tokens: int = 0
    has_begun: bool = False
    has_calls: bool = False


class AnswerRun:
    """Runs one request of the engine per prompt.

    Choice `i` of prompt `p` has the index p * n + i. `usage` is updated while events are read.
    """

    def __init__(
        self,
        state: ServerState,
        call: HttpCall,
        jobs: list[GenerationJob],
        make_parser: Callable[[], AnswerParser],
    ):
        self._state = state
        self._call = call
        self.jobs = jobs
        self._n = jobs[0].params.n
        self._choices = [ChoiceState(make_parser()) for _ in range(len(jobs) * self._n)]
        # The run keeps these, since active requests are completed even while the server shuts down.
        self.tokenizer = state.ready_engine().tokenizer
        self.usage = TokenUsage()
        self.outputs: dict[int, RequestOutput] = {}  # the first output of each prompt

    @property
    def params(self) -> SamplingParams:
        return self.jobs[0].params

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.jobs[0].token_ids

    @property
    def metrics(self) -> RequestMetrics | None:
        return self.outputs[0].metrics

    def _outputs(
        self, at_once: Callable[[RequestOutput], bool] | None = None
    ) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        return merged([run(self._state, self._call, job, at_once) for job in self.jobs])

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yields the new output of each choice."""
        async with aclosing(self._outputs()) as outputs:
            async for prompt_index, output in outputs:
                self._begin(output, prompt_index)
                for completion in output.outputs:
                    yield self._read(prompt_index * self._n + completion.index, completion)

    async def messages(self) -> list[FinishedChoice]:
        """Returns the whole choices."""
        found = [FinishedChoice(index) for index in range(len(self._choices))]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                found[delta.index].add(delta)
        return found

    async def written(
        self,
        write: Callable[[ChoiceDelta], bytes],
        around_text: dict[int, tuple[bytes, bytes]] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yields the pieces of a stream, as `write` encodes them.

        With a single prompt, a piece that can be sent at once is sent and not yielded. Several
        prompts are interleaved by the stream's task.

        For choices that have begun, `around_text` is what is sent before and after the JSON of a
        text if it is all that is new. This most common case has less overhead.
        """
        around_text = {} if around_text is None else around_text

        def piece(output: RequestOutput, prompt_index: int = 0) -> bytes:
            if prompt_index not in self.usage.num_cached_tokens:
                self._begin(output, prompt_index)
            first = prompt_index * self._n
            found: list[bytes | ChoiceDelta] = []
            for completion in output.outputs:
                index = first + completion.index
                choice, text = self._choices[index], completion.text
                if (
                    (around := around_text.get(index)) is not None
                    and text
                    and completion.finish_reason is None
                    and choice.parser.is_plain
                ):
                    num_tokens = len(completion.token_ids)
                    choice.has_begun = True
                    choice.num_tokens += num_tokens
                    self.usage.completion_tokens += num_tokens
                    found.append(around[0] + encode(text) + around[1])
                else:
                    found.append(self._read(index, completion))
            # Chunks are encoded only now, so that the usage in one counts the step's tokens of all
            # choices.
            return b"".join([one if isinstance(one, bytes) else write(one) for one in found])

        at_once = partial(self._call.push, piece) if len(self.jobs) == 1 else None
        async with aclosing(self._outputs(at_once)) as outputs:
            async for prompt_index, output in outputs:
                if chunk := piece(output, prompt_index):
                    yield chunk

    def _begin(self, output: RequestOutput, prompt_index: int) -> None:
        """Counts a prompt, which can be done more than once."""
        self.usage.add_prompt(prompt_index, output)
        self.outputs.setdefault(prompt_index, output)

    def _read(self, index: int, completion: CompletionOutput) -> ChoiceDelta:
        choice, reason = self._choices[index], completion.finish_reason
        parts = choice.parser.feed(completion.text) if completion.text else []
        if reason is not None:
            parts = [*parts, *choice.parser.finish()]
        for part in parts:
            if isinstance(part, Content):
                choice.has_begun = True
            elif isinstance(part, Reasoning):
                choice.reasonings.append(part.text)
            elif isinstance(part, ToolCallStart):
                choice.has_begun = choice.has_calls = True
        choice.num_tokens += len(completion.token_ids)
        self.usage.completion_tokens += len(completion.token_ids)
        if reason is not None:
            self._count_reasoning(choice)
            if reason == "stop" and choice.has_calls and not choice.parser.is_in_call:
                reason = "tool_calls"  # else a stop string cuts the arguments
            elif reason == "abort":  # by a pause, for example: the output is truncated
                reason = "length"
        return ChoiceDelta(
            index, parts, completion.token_ids, completion.logprobs, reason, completion.stop_reason
        )

    def _count_reasoning(self, choice: ChoiceState) -> None:
        """Counts the tokens of the reasoning text as the tokenizer encodes it, so that the count is
        the same for whole and streamed responses.
        """
        if not choice.reasonings:
            return
        num_tokens = choice.num_tokens
        if choice.has_begun:
            assert self.tokenizer is not None
            token_ids = self.tokenizer.encode("".join(choice.reasonings), False)
            num_tokens = min(len(token_ids), num_tokens)
        self.usage.reasoning_tokens += num_tokens
