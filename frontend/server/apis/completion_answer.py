"""The response of /v1/completions, whole or streamed, in OpenAI's format with vLLM's extensions.

Must not know: how the body was checked, the engine.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from ...answer_format import collect
from ..http.call import HttpCall
from ..state import ServerState
from ..turns.answer_run import AnswerRun, ChoiceDelta, FinishedChoice, UsageCounts
from ..turns.token_logprobs import CompletionLogprobs, joined, prompt_logprobs
from .openai_answer import OpenAIAnswer

CompletionFinishReason = Literal["stop", "length", "content_filter", "timeout"]


class CompletionChoice(msgspec.Struct, kw_only=True):
    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: CompletionFinishReason | None = None
    # As vLLM's extension, it has the stop token or string, and null for the end of sequence.
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


class CompletionAnswer(OpenAIAnswer):
    """The response to one checked body (routes/completions.py).

    Without `gives_tokens`, the one token that the engine generates is omitted.
    """

    id_prefix = "cmpl"
    object = object_of_chunk = "text_completion"
    type = type_of_chunk = Completion
    text_path = ("text",)

    def __init__(
        self,
        state: ServerState,
        call: HttpCall,
        body: Any,
        model: str,
        run: AnswerRun,
        *,
        gives_tokens: bool,
    ):
        super().__init__(state, call, body, model, run)
        self._gives_tokens = gives_tokens
        self._n = body.n or 1
        # The key is the index of the choice, and the value where its next token begins in its text.
        self._offsets: dict[int, int] = {}

    def _choice(self, delta: ChoiceDelta) -> CompletionChoice:
        choice = self._text_choice(delta.index, collect(delta.parts).content)
        choice.finish_reason = cast(CompletionFinishReason | None, delta.finish_reason)
        if self._body.logprobs is not None:
            choice.logprobs, self._offsets[delta.index] = self._writer.completion(
                delta.logprobs or [],
                self._offsets.get(delta.index, 0),
                skips_special=self._body.skip_special_tokens is not False,
            )
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = delta.token_ids
        return choice

    def _text_choice(self, index: int, text: str) -> CompletionChoice:
        return CompletionChoice(text=text, index=index)

    def _usage(self) -> UsageCounts:
        if not self._gives_tokens:
            self._run.usage.completion_tokens = 0
        return super()._usage()

    def _silent(self, prompt_index: int) -> list[FinishedChoice]:
        """Returns the n choices of a prompt after which no token is wanted."""
        first = prompt_index * self._n
        return [FinishedChoice(first + i, finish_reason="length") for i in range(self._n)]

    def _echo(self, prompt_index: int, index: int) -> CompletionChoice:
        """Returns the prompt as the beginning of a choice."""
        output, text = self._run.outputs[prompt_index], self._run.jobs[prompt_index].text
        if text is None or self._body.truncate_prompt_tokens is not None:
            tokenizer = self._run.tokenizer
            text = "" if tokenizer is None else tokenizer.decode(output.prompt_token_ids)
        choice = self._text_choice(index, text)
        if self._body.logprobs is not None:
            assert output.prompt_logprobs is not None  # routes/completions.py asks for them
            choice.logprobs = self._writer.prompt(
                output.prompt_token_ids, output.prompt_logprobs, text
            )
        self._offsets[index] = len(text)
        return choice

    # ------------------------------------------------------------ whole

    def _whole_choices(self, messages: list[FinishedChoice]) -> list[CompletionChoice]:
        choices = []
        for prompt_index, output in sorted(self._run.outputs.items()):
            for message in self._chosen(prompt_index, messages):
                echo = self._echo(prompt_index, message.index) if self._body.echo else None
                choice = self._choice(message)
                if echo is not None:
                    choice.text = echo.text + choice.text
                    if choice.logprobs is not None and echo.logprobs is not None:
                        choice.logprobs = joined(echo.logprobs, choice.logprobs)
                if self._body.prompt_logprobs is not None:
                    choice.prompt_logprobs = prompt_logprobs(output.prompt_logprobs)
                if self._body.return_token_ids:
                    choice.prompt_token_ids = output.prompt_token_ids
                choices.append(choice)
        return choices

    def _chosen(self, prompt_index: int, messages: list[FinishedChoice]) -> list[FinishedChoice]:
        """Returns the n choices of a prompt to return: the best generated ones, by mean
        log-probability per token.
        """
        if not self._gives_tokens:
            return self._silent(prompt_index)
        num_runs = self._run.params.n
        generated = messages[prompt_index * num_runs : (prompt_index + 1) * num_runs]
        if num_runs == self._n:
            return generated
        best = sorted(generated, key=mean_logprob, reverse=True)[: self._n]
        for i, message in enumerate(best):
            message.index = prompt_index * self._n + i
        return best

    # ------------------------------------------------------------ streamed

    def _beginning(self, index: int) -> bytes:
        """Returns the echoed prompt and its token ids, which are sent once for all choices of a
        prompt.
        """
        prompt_index = index // self._run.params.n
        first, chunks = prompt_index * self._n, []
        is_wanted = self._body.echo or self._body.return_token_ids
        if not is_wanted or first in self._offsets:
            return b""
        for i in range(first, first + self._n):
            choice = self._echo(prompt_index, i) if self._body.echo else self._text_choice(i, "")
            self._offsets[i] = len(choice.text)
            if self._body.return_token_ids:
                choice.prompt_token_ids = self._run.outputs[prompt_index].prompt_token_ids
                choice.token_ids = []
            chunks.append(self._chunk([choice]))
        return b"".join(chunks)

    def _choices(self, delta: ChoiceDelta) -> list[CompletionChoice]:
        if not self._gives_tokens:
            return [self._choice(silent) for silent in self._silent(delta.index)]
        if self._is_plain and not delta.parts and delta.finish_reason is None:
            return []
        return [self._choice(delta)]


def mean_logprob(message: FinishedChoice) -> float:
    assert message.logprobs is not None  # routes/completions.py asks for them
    own = [next(iter(position.values())).logprob for position in message.logprobs]
    return sum(own) / max(1, len(own))
