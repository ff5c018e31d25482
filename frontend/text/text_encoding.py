"""Texts and pairs of texts as token ids with a greatest length, many at once.

Must not know: requests, what the tokens are for.

A text that is too long is cut at its end, before the special tokens that close it; of a pair, the
longer text is cut first. The ids are those of the tokenizer with truncation, as
sentence-transformers uses it, whose setting would act on the whole tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tokenizers

from ...ipc.errors import InvalidParameterError
from .tokenizer import Tokenizer

Text = str | tuple[str, str]
SMALL_BATCH = 16  # texts


class EncodedText(NamedTuple):
    token_ids: list[int]
    # the index of the first token of a pair's second text, if the tokenizer gives it another
    # type; 0: none
    second_text_start: int = 0


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[Text], max_tokens: int | None = None
) -> list[EncodedText]:
    """The ids of each text or pair with its special tokens, at most `max_tokens`.

    Many or long texts are tokenized on all cores, without the GIL. Raises InvalidParameterError
    for values that are not valid text, and for a `max_tokens` that the special tokens alone exceed.
    """
    backend = tokenizer.backend
    try:
        num_characters = sum(len(part) for text in texts for part in _parts(text))
        is_small = len(texts) <= SMALL_BATCH and num_characters < SMALL_BATCH * 100
        encodings = (
            [_encode(backend, text) for text in texts]
            if is_small  # else the threads take longer than the work
            else backend.encode_batch_fast(list(texts))
        )
    except TypeError:
        bad = next((one for text in texts for one in _parts(text) if not _is_text(one)), None)
        raise InvalidParameterError(
            "prompt", f"must be text that UTF-8 can hold, got {type(bad).__name__} {bad!r:.40}"
        ) from None
    found = []
    for text, encoding in zip(texts, encodings, strict=True):
        if max_tokens is not None and len(encoding) > max_tokens:
            encoding = cut(backend, text, max_tokens)
        start = 0
        if not isinstance(text, str):
            types = encoding.type_ids
            start = types.index(1) if 1 in types else 0
        found.append(EncodedText(encoding.ids, start))
    return found


def cut_ids(token_ids: list[int], special_ids: frozenset[int], max_tokens: int) -> list[int]:
    """The first ids, at most `max_tokens`, and in the place of the last one a closing special token
    that the ids end with.
    """
    if len(token_ids) <= max_tokens:
        return token_ids
    if token_ids[-1] in special_ids:
        return [*token_ids[: max_tokens - 1], token_ids[-1]]
    return token_ids[:max_tokens]


def cut(backend: tokenizers.Tokenizer, text: Text, max_tokens: int) -> tokenizers.Encoding:
    """The encoding of a text or pair that has more than `max_tokens` tokens."""
    is_pair = not isinstance(text, str)
    room = max_tokens - backend.num_special_tokens_to_add(is_pair)
    if room < 1:
        raise InvalidParameterError(
            "truncate_prompt_tokens",
            f"must be more than the {max_tokens - room} special tokens of a text, got {max_tokens}",
        )
    first, *second = (backend.encode(part, add_special_tokens=False) for part in _parts(text))
    if not second:
        first.truncate(room)
        return backend.post_process(first)
    num_first, num_second = longest_first(len(first), len(second[0]), room)
    first.truncate(num_first)
    second[0].truncate(num_second)
    return backend.post_process(first, second[0])


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """The lengths to which two texts are cut so that they have `room` tokens together."""
    shorter, longer = sorted((first, second))
    longer = min(longer, max(shorter, room - shorter))
    if shorter + longer > room:
        shorter = room // 2
        longer = room - shorter
    return (shorter, longer) if first <= second else (longer, shorter)


def _encode(backend: tokenizers.Tokenizer, text: Text) -> tokenizers.Encoding:
    first, *second = _parts(text)
    return backend.encode(first, second[0] if second else None)


def _parts(text: Text) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else tuple(text)


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
