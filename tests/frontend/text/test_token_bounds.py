"""The bound on a token's length, for tokenizers of several kinds and random texts, and kinds
without a bound.
"""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire.frontend.text.token_bounds import composes, max_token_length
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.frontend.tiny_tokenizers import tiny_tokenizer_directory
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend


def backend(kind: str = "byte_level") -> Backend:
    return Backend.from_file(str(tiny_tokenizer_directory(kind) / "tokenizer.json"))


@settings(max_examples=100, deadline=None)
@given(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    st.sampled_from(["byte_level", "byte_fallback"]),
)
def test_no_text_has_fewer_tokens(text: str, kind: str) -> None:
    tokenizer = Tokenizer(tiny_tokenizer_directory(kind))
    assert tokenizer.max_token_length and len(
        tokenizer.encode(text, add_special_tokens=False)
    ) * tokenizer.max_token_length >= len(text)


def test_composed_text() -> None:
    composing = backend()
    assert not composes(composing)
    composing.normalizer = normalizers.Sequence([normalizers.NFC()])
    bound = max_token_length(composing)
    assert composes(composing) and bound is not None
    for text in ("e\u0301" * 50, "\u1100\u1161\u11a8" * 50, "\u03b1\u0313\u0300\u0345" * 50):
        assert len(composing.encode(text).ids) * bound >= len(unicodedata.normalize("NFC", text))


def change_normalizer(tokenizer: Backend) -> None:
    tokenizer.normalizer = normalizers.Strip()


def change_split(tokenizer: Backend) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )


def change_unknown_part(tokenizer: Backend) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()


def add_greedy_token(tokenizer: Backend) -> None:
    tokenizer.add_tokens([AddedToken("<eat>", rstrip=True)])


def replace_by_less(tokenizer: Backend) -> None:
    tokenizer.normalizer = normalizers.Replace("aaaa", "a")


@pytest.mark.parametrize(
    "change",
    [change_normalizer, change_split, change_unknown_part, add_greedy_token, replace_by_less],
)
def test_normalizers_that_remove_text_have_no_bound(change) -> None:
    tokenizer = backend()
    assert max_token_length(tokenizer) is not None
    change(tokenizer)
    assert max_token_length(tokenizer) is None


def test_unknown_words_have_no_bound() -> None:
    assert Tokenizer(tiny_tokenizer_directory("word_piece")).max_token_length is None
