"""Texts and pairs with a greatest length, against the tokenizers' own truncation."""

from __future__ import annotations

import pytest
from quire import InvalidParameterError
from quire.frontend.text.text_encoding import cut_ids, encode_texts, longest_first
from quire.frontend.text.tokenizer import Tokenizer
from quire.tests.tiny_models import save_tiny_tokenizer
from tokenizers import processors

TEXT = "the cat sat on the mat and the dog did not care about it at all"
WORDS = TEXT.split()
TEXTS = ["", "the", *(" ".join(WORDS[: n % 16 + 1] * (n // 16 + 1)) for n in range(0, 60, 11))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """With the special tokens of BERT: one in front, one behind each text, types of two texts."""
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(directory)
    made = Tokenizer(directory)
    made.backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        pair="<|im_start|> $A <|im_end|> $B:1 <|im_end|>:1",
        special_tokens=[(t, made.token_to_id(t)) for t in ("<|im_start|>", "<|im_end|>")],
    )
    return made


@pytest.mark.parametrize("most", [5, 9, 16, 40])
def test_cut_texts_equal_the_tokenizers_truncation(tokenizer, most) -> None:
    pairs = [(a, b) for a in TEXTS for b in TEXTS]
    mine = encode_texts(tokenizer, [*TEXTS, *pairs], most)
    backend = tokenizer.backend
    backend.enable_truncation(most, strategy="longest_first")
    try:
        theirs = [backend.encode(text) for text in TEXTS]
        theirs += [backend.encode(a, b) for a, b in pairs]
    finally:
        backend.no_truncation()
    for own, other in zip(mine, theirs, strict=True):
        assert own.token_ids == other.ids and len(own.token_ids) <= most
        assert own.token_ids[-1] == tokenizer.token_to_id("<|im_end|>")
    for (_, second), own, other in zip(pairs, mine[len(TEXTS) :], theirs[len(TEXTS) :]):
        assert own.second_text_start == (other.type_ids.index(1) if 1 in other.type_ids else 0)
    alone = [encode_texts(tokenizer, [text], most)[0] for text in [*TEXTS, *pairs]]
    assert alone == mine


def test_refusals(tokenizer) -> None:
    with pytest.raises(InvalidParameterError, match="more than the 2 special tokens"):
        encode_texts(tokenizer, ["the cat sat"], 2)
    for texts in (["lone \ud800"], ["a", "lone \ud800"], [("a", "lone \ud800")]):
        with pytest.raises(InvalidParameterError, match="prompt: must be text that UTF-8"):
            encode_texts(tokenizer, texts)


def test_cut_ids_keep_a_closing_special_token() -> None:
    special = frozenset({9})
    assert cut_ids([1, 2, 3, 9], special, 3) == [1, 2, 9]
    assert cut_ids([1, 2, 3, 4], special, 3) == [1, 2, 3]
    assert cut_ids([1, 2, 9], special, 3) == [1, 2, 9]
    assert cut_ids([1, 9], special, 1) == [9]


def test_the_longer_text_of_a_pair_is_cut_first() -> None:
    assert longest_first(3, 10, 8) == (3, 5)
    assert longest_first(10, 3, 8) == (5, 3)
    assert longest_first(10, 10, 9) == (4, 5)
    assert longest_first(20, 10, 9) == (5, 4)
    assert longest_first(2, 3, 9) == (2, 3)
