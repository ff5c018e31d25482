"""Texts to token ids beside everything else that the server does: short ones at once, long ones in
threads of their own, two at a time.

Must not know: whose text it is.

The tokenizer lets go of the interpreter (encode_batch does), but takes up to 170 bytes for each
character: two threads bound the memory, what cannot fit in the context is refused by its length
where that is certain, and after a very long text the memory goes back to the system.
"""

from __future__ import annotations

import asyncio
import unicodedata
from concurrent.futures import ThreadPoolExecutor

from ..text.token_bounds import composes
from ..text.tokenizer import Tokenizer
from .http.call import release_memory
from .http.errors import ApiError, invalid
from .state import ServerState

# characters; the tokenizer takes milliseconds for more, which other requests should not wait for
LONG_TEXT = 20_000
HUGE_TEXT = 1_000_000  # characters whose memory is worth giving back
THREADS = ThreadPoolExecutor(2, "quire tokenize")  # none is started before it is needed


async def tokenize_all(
    state: ServerState,
    texts: list[str],
    *,
    add_special_tokens: bool = True,
    param: str | None = None,
) -> list[list[int]]:
    """`param`: the field of the body that a text is refused under, where it cannot fit in the
    model's context; None: any length will do.
    """
    tokenizer = state.ready_engine().tokenizer
    if tokenizer is None:
        raise no_tokenizer()
    num_characters = sum(map(len, texts))
    if num_characters < LONG_TEXT:
        return [tokenizer.encode(text, add_special_tokens) for text in texts]
    most = state.max_model_len
    return await asyncio.get_running_loop().run_in_executor(
        THREADS, _encode, tokenizer, texts, add_special_tokens, param, most, num_characters
    )


def no_tokenizer() -> ApiError:
    return invalid("prompt", "This model has no tokenizer here: prompts must be token ids.")


def _encode(
    tokenizer: Tokenizer,
    texts: list[str],
    add_special_tokens: bool,
    param: str | None,
    max_model_len: int,
    num_characters: int,
) -> list[list[int]]:
    if param is not None:
        for text in texts:
            check_length(tokenizer, text, param, max_model_len)
    try:
        # also of one: `encode` keeps the interpreter to itself
        return tokenizer.encode_batch(texts, add_special_tokens)
    finally:
        if num_characters > HUGE_TEXT:
            release_memory()


def check_length(tokenizer: Tokenizer, text: str, param: str, max_model_len: int) -> None:
    """Raises for a text that has too many tokens for sure."""
    longest = tokenizer.max_token_length
    if longest is None or len(text) <= longest * max_model_len:
        return
    num_characters = len(text)
    if composes(tokenizer.backend) and not unicodedata.is_normalized("NFC", text):
        num_characters //= 4  # as many characters at most become one
    num_tokens = -(-num_characters // longest)
    if num_tokens > max_model_len:
        problem = f"the text of your {param} has {len(text)} characters, which are at least {num_tokens} tokens"
        message = f"This model's maximum context length is {max_model_len} tokens. However, {problem}. Please reduce the length of the {param}."
        raise ApiError(400, message, code="context_length_exceeded", param=param)
