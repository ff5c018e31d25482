"""Log-probabilities in the two formats of OpenAI's API, and prompt log-probabilities in vLLM's.

Must not know: requests, chunks.

A token that is not complete text by itself, such as part of an emoji, is written as its bytes:
"bytes:\\xf0\\x9f" in completions, "\\xf0\\x9f" in chat.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...outputs import Logprob, PositionLogprobs
from ...text.tokenizer import Tokenizer

LEAST = -9999.0  # OpenAI's value for a probability of zero; JSON has no infinity


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


class CompletionLogprobs(msgspec.Struct):
    """Four lists of equal length. The first token of a prompt has no probability."""

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class TokenWriter:
    """Converts tokens to their text in the API.

    With `as_ids`, the text is "token_id:7" (vLLM's return_tokens_as_token_ids).
    """

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False):
        self._table = None if tokenizer is None else tokenizer.piece_tables[False]
        self._special_ids = frozenset() if tokenizer is None else tokenizer.special_ids
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def raw(self, token_id: int, candidate: Logprob | None = None) -> bytes:
        if self._table is not None:
            return self._table[token_id]
        if candidate is not None and candidate.decoded_token is not None:
            return candidate.decoded_token.encode()
        return b"" if self._tokenizer is None else self._tokenizer.decode([token_id]).encode()

    def text(self, token_id: int, raw: bytes, prefix: str) -> str:
        if self._as_ids or self._tokenizer is None:
            return f"token_id:{token_id}"
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)

    # ------------------------------------------------------------ chat

    def chat(self, positions: list[PositionLogprobs], num_top: int) -> list[TokenLogprob]:
        """Returns the sampled token of each position and its `num_top` most probable tokens, the
        most probable first.
        """
        written = []
        for position in positions:
            (own_id, own), *others = position.items()
            has_own_among_top = len(position) <= num_top
            top = (
                sorted([(own_id, own), *others], key=lambda pair: pair[1].rank or 0)
                if has_own_among_top
                else others
            )
            raw = self.raw(own_id, own)
            tops = [self._top(token_id, candidate) for token_id, candidate in top[:num_top]]
            written.append(
                TokenLogprob(self.text(own_id, raw, ""), max(own.logprob, LEAST), list(raw), tops)
            )
        return written

    def _top(self, token_id: int, candidate: Logprob) -> TopLogprob:
        raw = self.raw(token_id, candidate)
        return TopLogprob(self.text(token_id, raw, ""), max(candidate.logprob, LEAST), list(raw))

    # ------------------------------------------------------------ completions

    def completion(
        self, positions: list[PositionLogprobs], offset: int, *, skips_special: bool
    ) -> tuple[CompletionLogprobs, int]:
        """Returns log-probabilities of output tokens that begin `offset` characters into the text,
        and the offset of the next token.

        top_logprobs contain the sampled token and the most probable ones, up to one more than
        requested, as in OpenAI's API.
        """
        found = CompletionLogprobs([], [], [], [])
        for position in positions:
            own_id, own = next(iter(position.items()))
            self._add(found, offset, own_id, position)
            if not (skips_special and own_id in self._special_ids):
                offset += len(own.decoded_token or "")
        return found, offset

    def prompt(
        self, token_ids: list[int], positions: list[PositionLogprobs | None], text: str
    ) -> CompletionLogprobs:
        """Returns log-probabilities of the tokens of an echoed prompt.

        Tokens that the tokenizer adds in front, such as BOS, have no length in the text.
        """
        found, offset = CompletionLogprobs([], [], [], []), 0
        for token_id, position in zip(token_ids, positions, strict=True):
            self._add(found, offset, token_id, position)
            own = None if position is None else position[token_id].decoded_token
            piece = self.raw(token_id).decode(errors="ignore") if own is None else own
            if text.startswith(piece, offset) or token_id not in self._special_ids:
                offset = min(len(text), offset + len(piece))
        return found

    def _add(
        self,
        found: CompletionLogprobs,
        offset: int,
        token_id: int,
        position: PositionLogprobs | None,
    ) -> None:
        found.text_offset.append(offset)
        found.tokens.append(
            self.text(
                token_id,
                self.raw(token_id, None if position is None else position[token_id]),
                "bytes:",
            )
        )
        if position is None:
            found.token_logprobs.append(None)
            found.top_logprobs.append(None)
            return
        found.token_logprobs.append(max(position[token_id].logprob, LEAST))
        top: dict[str, float] = {}
        for i, candidate in position.items():
            top.setdefault(
                self.text(i, self.raw(i, candidate), "bytes:"), max(candidate.logprob, LEAST)
            )
        found.top_logprobs.append(top)


def prompt_logprobs(
    positions: list[PositionLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Returns vLLM's format: one object per prompt token, from token ids to candidates; null for
    the first token.
    """
    if positions is None:
        return None
    return [
        None
        if position is None
        else {str(i): _candidate(candidate) for i, candidate in position.items()}
        for position in positions
    ]


def _candidate(candidate: Logprob) -> dict[str, Any]:
    return {
        "logprob": max(candidate.logprob, LEAST),
        "rank": candidate.rank,
        "decoded_token": candidate.decoded_token,
    }


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )
