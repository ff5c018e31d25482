"""TokenUsage: the number of tokens of a call, in the format of each API.

Must not know: text, routes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ...outputs import RequestOutput


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
