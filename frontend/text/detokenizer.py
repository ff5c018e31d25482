"""Incremental decoding of tokens to text, with detection of stop strings.

Must not know: messages, other requests, the readers of the text.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from ...ipc.messages import FinishReason
from ...ipc.params import SamplingParams
from .tokenizer import REPLACEMENT, PieceTable, Tokenizer

MAX_CHARACTER_TOKENS = 4  # a character has at most four bytes, and a token at least one


class TokenDecoder(Protocol):
    """The interface of both decoders.

    The results of all `decode` calls and of `flush`, concatenated, are the text of all tokens.
    """

    def decode(self, token_ids: list[int]) -> str:
        """Returns the text that these tokens complete."""
        ...

    def flush(self) -> str:
        """Returns the remaining text at the end, with an incomplete character as U+FFFD."""
        ...


class NoText:
    """The text of a request whose tokens are not decoded, or that has none."""

    text = ""

    def take_delta(self) -> str:
        return ""

    def update(
        self, token_ids: list[int], finish_reason: FinishReason | None = None
    ) -> tuple[int, str | None]:
        return len(token_ids), None


NO_TEXT = NoText()


class IncrementalDetokenizer:
    """The growing text of one request's output.

    `include_stop`: the token that ends the request adds its text.
    """

    def __init__(self, decoder: TokenDecoder, include_stop: bool):
        self._decoder = decoder
        self._include_stop = include_stop
        self._shown: list[str] = []
        self._num_taken = 0  # number of entries of _shown that take_delta has returned

    @property
    def text(self) -> str:
        self._shown[:] = ["".join(self._shown)]
        return self._shown[0]

    def take_delta(self) -> str:
        """Returns the text added since the last call. A reader uses either this or `text`."""
        start, self._num_taken = self._num_taken, len(self._shown)
        return self._shown[start] if start + 1 == self._num_taken else "".join(self._shown[start:])

    def update(
        self, token_ids: list[int], finish_reason: FinishReason | None = None
    ) -> tuple[int, str | None]:
        """Appends new tokens. `finish_reason` is passed with the last ones.

        Returns how many of them belong to the output (fewer than all if a stop string ends it
        early) and that stop string.
        """
        if finish_reason is not None:
            self._end(token_ids, finish_reason)
        elif token_ids:
            self._shown.append(self._decoder.decode(token_ids))
        return len(token_ids), None

    def _end(self, token_ids: list[int], finish_reason: FinishReason) -> None:
        if finish_reason is FinishReason.STOP and not self._include_stop:
            token_ids = token_ids[:-1]  # the token that ended the request adds no text
        if token_ids:
            self._shown.append(self._decoder.decode(token_ids))
        self._shown.append(self._decoder.flush())


class StoppingDetokenizer(IncrementalDetokenizer):
    """Truncates the text at the first stop string.

    The stop string that is complete first applies. If several end at the same character, the first
    one in the list applies, so the text does not depend on how it is split into tokens. Text that
    may be the beginning of a stop string is deferred until more tokens decide it.
    """

    def __init__(self, decoder: TokenDecoder, params: SamplingParams):
        super().__init__(decoder, params.include_stop_str_in_output)
        self._stops = params.stop_list
        # a stop string that is complete within these tokens is ignored
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        # decoded but deferred: it ends with a possible beginning of a stop string
        self._held = ""

    def update(
        self, token_ids: list[int], finish_reason: FinishReason | None = None
    ) -> tuple[int, str | None]:
        is_hidden = finish_reason is FinishReason.STOP and not self._include_stop
        for num_used, token_id in enumerate(token_ids[:-1] if is_hidden else token_ids, 1):
            self._num_tokens += 1
            if stop := self._search(self._decoder.decode([token_id])):
                return num_used, stop
        if finish_reason is None:
            return len(token_ids), None
        stop = self._search(self._decoder.flush())
        if stop is None:
            self._shown.append(self._held)
            self._held = ""
        return len(token_ids), stop

    def _search(self, new_text: str) -> str | None:
        """Adds text, releases the part that is not deferred, and returns the stop string if one is
        complete.
        """
        num_searched = len(self._held)
        self._held += new_text
        found = (
            find_stop(self._held, self._stops, num_searched)
            if self._num_tokens > self._min_tokens
            else None
        )
        if found is not None:
            start, end, stop = found
            self._shown.append(self._held[: end if self._include_stop else start])
            self._held = ""
            return stop
        num_safe = len(self._held) - max(
            length_of_possible_stop(self._held, stop) for stop in self._stops
        )
        if num_safe:
            self._shown.append(self._held[:num_safe])
            self._held = self._held[num_safe:]
        return None


def find_stop(text: str, stops: list[str], num_searched: int) -> tuple[int, int, str] | None:
    """Returns (start, end, stop) of the match with the first end after `num_searched` characters.

    If several match, the first of `stops`; None without a match.
    """
    best = None
    for stop in stops:
        start = text.find(stop, max(0, num_searched - len(stop) + 1))
        if start != -1 and (best is None or start + len(stop) < best[1]):
            best = (start, start + len(stop), stop)
    return best


def length_of_possible_stop(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) != -1:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0


# ---------------------------------------------------------------- decoding


def make_detokenizer(
    tokenizer: Tokenizer | None, prompt_token_ids: list[int], params: SamplingParams
) -> NoText | IncrementalDetokenizer:
    if tokenizer is None or not params.detokenize:
        return NO_TEXT
    decoder = make_decoder(tokenizer, prompt_token_ids, params)
    if params.stop:
        return StoppingDetokenizer(decoder, params)
    return IncrementalDetokenizer(decoder, params.include_stop_str_in_output)


def make_decoder(
    tokenizer: Tokenizer, prompt_token_ids: list[int], params: SamplingParams
) -> TokenDecoder:
    """Returns the fast, exact decoder for byte-level and byte-fallback vocabularies, otherwise the
    general one.
    """
    table = tokenizer.piece_tables[params.skip_special_tokens]
    if table is not None:
        return PieceDecoder(table, prompt_token_ids)
    return WindowDecoder(
        tokenizer,
        prompt_token_ids,
        params.skip_special_tokens,
        params.spaces_between_special_tokens,
    )


class PieceDecoder:
    """Concatenates the tokens' bytes and decodes them as UTF-8; the bytes of an unfinished
    character are buffered. O(1) per token.

    Equal to decoding all tokens at once, with one exception in byte-fallback vocabularies: there a
    run of byte tokens with one invalid byte becomes U+FFFD throughout, while here the complete
    characters before that byte have already been emitted.
    """

    def __init__(self, table: PieceTable, prompt_token_ids: list[int]):
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")(table.errors)
        # A prompt given as ids may end within a character. The output may complete it; if it does
        # not, its U+FFFD belongs to the prompt.
        self._utf8.decode(b"".join(table[i] for i in prompt_token_ids[-MAX_CHARACTER_TOKENS:]))
        num_begun = len(self._utf8.getstate()[0])
        self._is_within_character = num_begun > 0
        self._num_of_prompt = min(num_begun, 1) if table.errors == "replace" else num_begun
        at_start = table.num_stripped and not any(table[i] for i in prompt_token_ids)
        self._num_to_strip = table.num_stripped if at_start else 0

    def decode(self, token_ids: list[int]) -> str:
        table, text = self._table, None
        if len(token_ids) == 1 and not self._is_within_character:
            text = table.text_of(token_ids[0])  # the most common case, at a third of the time
        if text is None:
            text = self._utf8.decode(b"".join([table[i] for i in token_ids]))
            self._is_within_character = bool(self._utf8.getstate()[0])
        return self._own(text) if self._num_of_prompt or self._num_to_strip else text

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        return self._own(text) if text else text

    def _own(self, text: str) -> str:
        """Removes the text that belongs to the prompt or that decoding a whole text would strip."""
        if self._num_of_prompt and text:
            text = text[self._num_of_prompt :] if text.startswith(REPLACEMENT) else text
            self._num_of_prompt = 0
        if self._num_to_strip and text:
            num_spaces = len(text) - len(text.lstrip(" "))
            num_taken = min(num_spaces, self._num_to_strip)
            # Spaces may arrive one token at a time: continue until another character arrives.
            self._num_to_strip = self._num_to_strip - num_taken if num_spaces == len(text) else 0
            text = text[num_taken:]
        return text


class WindowDecoder:
    """Decodes the last few tokens twice, with and without the new one; the difference is the new
    text. Works with any decoder.

    This is the prefix-offset method of Hugging Face's text-generation-inference: the spaces of new
    tokens depend on the tokens before them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: list[int],
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._spaces = skip_special_tokens or spaces_between_special_tokens
        self._context = prompt_token_ids[-MAX_CHARACTER_TOKENS:]
        self._pending: list[int] = []
        self._last_was_added = False

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(self._decode_one, token_ids))

    def flush(self) -> str:
        return self._take()

    def _decode_one(self, token_id: int) -> str:
        added = self._tokenizer.added_tokens.get(token_id)
        follows_added, self._last_was_added = self._last_was_added, added is not None
        if added is not None and follows_added and not self._spaces:
            text = self._take() + added
            self._context = [token_id]
            return text
        self._pending.append(token_id)
        unfinished = (
            self._text(self._context + self._pending).endswith(REPLACEMENT)
            and len(self._pending) < MAX_CHARACTER_TOKENS
        )
        return "" if unfinished else self._take()

    def _take(self) -> str:
        before, after = self._text(self._context), self._text(self._context + self._pending)
        if len(after) > len(before):
            self._context, self._pending = self._pending, []
            return after[len(before) :]
        # The token adds no text (a skipped special token, for example): keep the context and drop
        # the token.
        self._pending = []
        return ""

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
