"""Tokenizing beside the loop: short and long texts alike, what is refused unread, and that the loop
goes on meanwhile.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.tokenizing import LONG_TEXT, check_length, tokenize_all
from quire.tests.frontend.tiny_tokenizers import tiny_tokenizer
from tokenizers import normalizers


def state(max_model_len: int = 10**9, tokenizer=None) -> SimpleNamespace:
    return SimpleNamespace(
        ready_engine=lambda: SimpleNamespace(tokenizer=tokenizer or tiny_tokenizer()),
        max_model_len=max_model_len,
    )


def test_however_long_the_ids_are_the_same() -> None:
    long = "the cat sat on it. " * (2 * LONG_TEXT // 19)
    for texts in (["the cat"], ["the cat", "sat"], [long], [long, "the cat"]):
        assert asyncio.run(tokenize_all(state(), texts)) == [
            tiny_tokenizer().encode(text) for text in texts
        ]


def test_the_loop_goes_on_meanwhile() -> None:
    async def run() -> int:
        reading = asyncio.ensure_future(tokenize_all(state(), ["the cat sat on it. " * 50_000]))
        num_turns = 0
        while not reading.done():
            await asyncio.sleep(0.001)
            num_turns += 1
        return num_turns

    assert asyncio.run(run()) > 5


def test_what_is_far_too_long_is_refused_unread() -> None:
    longest = tiny_tokenizer().max_token_length
    with pytest.raises(ApiError) as caught:
        asyncio.run(tokenize_all(state(64), ["x" * 30_000_000], param="messages"))
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "context_length_exceeded", "messages")
    assert f"at least {-(-30_000_000 // longest)} tokens" in error.message
    check_length(tiny_tokenizer(), "x" * longest * 64, "prompt", 64)  # as long as could just be


def test_decomposed_text_gets_the_benefit_of_the_doubt() -> None:
    backend = SimpleNamespace(normalizer=normalizers.NFC())
    tokenizer = SimpleNamespace(max_token_length=2, backend=backend)
    check_length(tokenizer, "e\u0301" * 200, "prompt", 100)
    for text in ("x" * 400, "e\u0301" * 500):
        with pytest.raises(ApiError):
            check_length(tokenizer, text, "prompt", 100)


def test_without_a_bound_or_a_tokenizer() -> None:
    check_length(SimpleNamespace(max_token_length=None), "x" * 10_000, "prompt", 10)
    no_tokenizer = SimpleNamespace(ready_engine=lambda: SimpleNamespace(tokenizer=None))
    with pytest.raises(ApiError, match="token ids"):
        asyncio.run(tokenize_all(no_tokenizer, ["the"]))
