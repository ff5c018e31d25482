"""Output of log-probabilities: tokens that are not a whole text, offsets, ties, zero probabilities,
prompts with a BOS.
"""

import math
from pathlib import Path

import msgspec
import pytest
from quire.frontend.outputs import Logprob
from quire.frontend.server.turns.token_logprobs import TokenWriter, joined, prompt_logprobs
from quire.frontend.text.tokenizer import Tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

EURO = "€".encode()  # three bytes, three tokens
HI, BOS, ODD = 256, 257, 258


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda character: character)
    vocab = {character: i for i, character in enumerate(alphabet)} | {"hi": HI}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.decoder, backend.pre_tokenizer = (
        decoders.ByteLevel(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    backend.add_special_tokens(["<bos>"])
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, False)


def test_part_of_a_character_is_shown_as_its_bytes(tokenizer: Tokenizer) -> None:
    writer, ids = TokenWriter(tokenizer), ids_of(tokenizer, "€")
    assert len(ids) == 3
    texts = ["", "", "€"]  # the text that each token adds
    positions = [{i: Logprob(-0.5, 1, text)} for i, text in zip(ids, texts, strict=True)]
    chat = writer.chat(positions, 0)
    assert [entry.token for entry in chat] == ["\\xe2", "\\x82", "\\xac"] and bytes(
        b for e in chat for b in e.bytes
    ) == EURO
    legacy, offset = writer.completion(positions, 4, skips_special=True)
    assert (
        legacy.tokens == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
        and legacy.text_offset == [4, 4, 4]
        and offset == 5
    )


def test_as_many_top_entries_as_requested_most_likely_first(tokenizer: Tokenizer) -> None:
    a, b, c = (ids_of(tokenizer, letter)[0] for letter in "abc")
    unlikely = {c: Logprob(-3.0, 3, "c"), a: Logprob(-0.1, 1, "a"), b: Logprob(-0.2, 2, "b")}
    likely = {b: Logprob(-0.2, 2, "b"), a: Logprob(-0.1, 1, "a")}
    first, second = TokenWriter(tokenizer).chat([unlikely, likely], 2)
    assert first.token == "c" and [top.token for top in first.top_logprobs] == ["a", "b"]
    assert second.token == "b" and [top.token for top in second.top_logprobs] == ["a", "b"]
    (legacy, _) = TokenWriter(tokenizer).completion([unlikely], 0, skips_special=True)
    assert legacy.top_logprobs == [{"c": -3.0, "a": -0.1, "b": -0.2}]


def test_json_has_no_infinity(tokenizer: Tokenizer) -> None:
    (a,) = ids_of(tokenizer, "a")
    chat = TokenWriter(tokenizer).chat([{a: Logprob(-math.inf, 9, "a")}], 0)
    assert msgspec.json.decode(msgspec.json.encode(chat))[0]["logprob"] == -9999.0


def test_a_bos_has_no_width_in_an_echo(tokenizer: Tokenizer) -> None:
    bos, (h, i) = tokenizer.token_to_id("<bos>"), ids_of(tokenizer, "hi")
    positions = [None, {h: Logprob(-1.0, 1, "h")}, {i: Logprob(-2.0, 1, "i")}]
    found = TokenWriter(tokenizer).prompt([bos, h, i], positions, "hi")
    assert (
        found.tokens == ["<bos>", "h", "i"]
        and found.text_offset == [0, 0, 1]
        and found.token_logprobs == [None, -1.0, -2.0]
    )
    written = TokenWriter(tokenizer).prompt([bos, h, i], positions, "<bos>hi")  # the user wrote it
    assert written.text_offset == [0, 5, 6]


def test_special_tokens_that_the_text_omits_have_no_width(tokenizer: Tokenizer) -> None:
    bos, (h, i) = tokenizer.token_to_id("<bos>"), ids_of(tokenizer, "hi")
    positions = [
        {h: Logprob(-1.0, 1, "h")},
        {bos: Logprob(-1.0, 1, "<bos>")},
        {i: Logprob(-1.0, 1, "i")},
    ]
    writer = TokenWriter(tokenizer)
    assert writer.completion(positions, 0, skips_special=True)[0].text_offset == [0, 1, 1]
    assert writer.completion(positions, 0, skips_special=False)[0].text_offset == [0, 1, 6]


def test_ids_instead_of_texts(tokenizer: Tokenizer) -> None:
    writer = TokenWriter(tokenizer, as_ids=True)
    found, _ = writer.completion(
        [{7: Logprob(-1.0, 1, "x"), 8: Logprob(-2.0, 2, "y")}], 0, skips_special=True
    )
    assert found.tokens == ["token_id:7"] and found.top_logprobs == [
        {"token_id:7": -1.0, "token_id:8": -2.0}
    ]
    assert joined(found, found).tokens == ["token_id:7"] * 2


def test_prompt_log_probabilities_in_vllms_format() -> None:
    assert prompt_logprobs(None) is None
    assert prompt_logprobs([None, {5: Logprob(-1.0, 2, "x")}]) == [
        None,
        {"5": {"logprob": -1.0, "rank": 2, "decoded_token": "x"}},
    ]
