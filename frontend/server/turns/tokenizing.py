"""Tokenizes texts without blocking the server: short ones at once, long ones in dedicated threads.

Must not know: the client that sent a text.

The tokenizer's encode_batch releases the GIL, but takes up to 170 bytes per character, and one
second per million characters. So there are two threads, used round-robin by key. Texts that
certainly exceed the context are rejected by their length. Texts that need not fit have a limit of
their own. A request whose client has disconnected releases its turns.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Any

from ....ipc.platform_tuning import trim_heap
from ...text.token_bounds import composes
from ...text.tokenizer import Tokenizer
from ..admission import in_turn
from ..http.call import HttpCall
from ..http.errors import invalid, too_long
from ..state import ServerState

FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
# A text of more characters takes milliseconds, which would delay other requests.
LONG_TEXT = 20_000
SLICE = 500_000  # characters of short texts that are tokenized in one turn
HUGE_TEXT = 1_000_000  # characters from which the memory is returned to the system
# A text may have this many characters per token of context if it need not fit.
CHARACTERS_PER_TOKEN = 16


def prompts_of(given: Any, name: str, most: int, kind: str = "texts") -> list[str | list[int]]:
    """Converts the four forms of OpenAI's `prompt` and `input` to a list of texts and lists of
    token ids.

    Raises ApiError 400 that names the field, `name`, and what it has, `kind`.
    """
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]
    if int in kinds:
        raise invalid(name, f"'{name}' must be {FORMS}.", "invalid_type")
    check_number(name, given, most, kind)
    return given


def check_number(name: str, texts: Sequence[Any], most: int, kind: str = "texts") -> None:
    if len(texts) > most:
        raise invalid(
            name,
            f"'{name}' can have at most {most} {kind}, got {len(texts)}.",
            "array_above_max_length",
        )


async def tokenize_all(
    state: ServerState,
    call: HttpCall,
    texts: list[str],
    *,
    param: str,
    must_fit: bool,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Returns the token ids of each text.

    Raises ApiError 400 that names `param` for a text that, with `must_fit`, certainly exceeds the
    model's context, or exceeds `max_characters`; 429 when too many requests wait for their turn.
    """
    tokenizer = state.ready_engine().tokenizer
    if tokenizer is None:
        raise invalid("prompt", "This model has no tokenizer: prompts must be token ids.")
    if sum(map(len, texts)) < LONG_TEXT:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]
    most = state.max_model_len

    def encode(slice_of_texts: list[str]) -> list[list[int]]:
        if must_fit:
            for text in slice_of_texts:
                check_length(tokenizer, text, param, most)
        try:
            # encode_batch is used even for one text: `encode` holds the GIL.
            return tokenizer.encode_batch(slice_of_texts, add_special_tokens)
        finally:
            if sum(map(len, slice_of_texts)) > HUGE_TEXT:
                trim_heap()

    if not must_fit or tokenizer.max_token_length is None:
        for text in texts:
            check_num_characters(len(text), param, most)
    found: list[list[int]] = []
    for some in slices(texts):
        found += await in_turn(state.work_turns, call, lambda some=some: encode(some))
    return found


def slices(texts: list[str]) -> Iterator[list[str]]:
    """Yields all texts in order, in lists of one text or of at most SLICE characters."""
    some: list[str] = []
    for text in texts:
        if some and sum(map(len, some)) + len(text) > SLICE:
            yield some
            some = []
        some.append(text)
    yield some


def max_characters(max_model_len: int) -> int:
    return max(HUGE_TEXT, CHARACTERS_PER_TOKEN * max_model_len)


def check_num_characters(num_characters: int, param: str, max_model_len: int) -> None:
    """Raises ApiError for a text that takes too long to tokenize."""
    most = max_characters(max_model_len)
    if num_characters > most:
        raise invalid(
            param,
            f"'{param}' must have at most {most} characters, got {num_characters}.",
            "string_above_max_length",
        )


def check_length(tokenizer: Tokenizer, text: str, param: str, max_model_len: int) -> None:
    """Raises ApiError for a text that certainly has too many tokens."""
    longest = tokenizer.max_token_length
    if longest is None or len(text) <= longest * max_model_len:
        return
    num_characters = len(text)
    if composes(tokenizer.backend) and not unicodedata.is_normalized("NFC", text):
        num_characters //= 4  # at most four characters become one
    num_tokens = -(-num_characters // longest)
    if num_tokens > max_model_len:
        problem = f"the text of your {param} has {len(text)} characters"
        raise too_long(param, max_model_len, f"{problem}, which are at least {num_tokens} tokens")
