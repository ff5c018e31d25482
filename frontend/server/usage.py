"""Usage: the number of tokens of a call, in the format of each API.

Must not know: text, routes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..outputs import RequestOutput


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


class Usage:
    """Counts over the outputs of one call, deltas or final ones; prompts are identified by their
    index.
    """

    def __init__(self) -> None:
        self._num_prompt_tokens: dict[int, int] = {}
        self._num_cached_tokens: dict[int, int] = {}
        self.completion_tokens = 0
        self.reasoning_tokens = 0

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        if prompt_index not in self._num_cached_tokens:  # neither changes once it is known
            self._num_prompt_tokens[prompt_index] = len(output.prompt_token_ids)
            if output.num_cached_tokens is not None:
                self._num_cached_tokens[prompt_index] = output.num_cached_tokens
        for completion in output.outputs:
            self.completion_tokens += len(completion.token_ids)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._num_prompt_tokens.values())

    @property
    def cached_tokens(self) -> int:
        return sum(self._num_cached_tokens.values())

    def counts(self) -> UsageCounts:
        prompt_tokens, completion_tokens = self.prompt_tokens, self.completion_tokens
        cached, reasoning = (
            PromptTokensDetails(self.cached_tokens),
            CompletionTokensDetails(self.reasoning_tokens),
        )
        return UsageCounts(
            prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, cached, reasoning
        )

    def as_openai(self) -> dict[str, Any]:
        return msgspec.to_builtins(self.counts())
