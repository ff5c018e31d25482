"""Tokenizers from GGUF metadata: the same ids as the tokenizer that the metadata was made from."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from quire.frontend.model_info.model_files import find_model_directory
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.gguf import read_gguf
from quire.ipc.models.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    gguf_tokenizer_config,
    tokenizer_json,
)
from quire.tests.gguf_checkpoints import tokenizer_of_encoder
from quire.tests.gguf_files import write_gguf
from quire.tests.gguf_tokenizers import WORD_LINES, built, differences, metadata_of, texts
from quire.tests.tiny_encoders import save_word_piece

BUNDLED = find_model_directory("bundled") / "tokenizer.json"


def bundled_metadata(**changes: Any) -> dict[str, Any]:
    """The bundled tokenizer as llama.cpp's conversion writes it, with a token for padding."""
    own = json.loads(BUNDLED.read_text())
    metadata = metadata_of(own, "qwen2", eos_token_id=2, bos_token_id=0, padding_token_id=0)
    metadata["tokenizer.ggml.tokens"].append("[PAD]")
    metadata["tokenizer.ggml.token_type"].append(UNUSED)
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_tokens_before_and_after_a_text(tmp_path: Path) -> None:
    plain = built(tmp_path, bundled_metadata()).encode("a").ids
    for changes, before, after in (
        ({"add_bos_token": True}, [0], []),
        ({"add_eos_token": True}, [], [2]),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [2]),
        ({"pre": "llama-bpe"}, [0], []),  # its files may leave the key out
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
    ):
        tokenizer = built(tmp_path, bundled_metadata(**changes))
        assert tokenizer.encode("a").ids == before + plain + after
        assert tokenizer.encode("a", "a").ids == before + plain + plain + after
        assert tokenizer.encode("a", add_special_tokens=False).ids == plain


OF_BPE: dict[str, Any] = {
    "vocab_size": 600,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}


def trained(model_type: str = "bpe", **options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    rng, words = random.Random(1), WORD_LINES.split()
    lines = [" ".join(rng.choices(words, k=10)) for _ in range(2000)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type=model_type,
        character_coverage=0.99,
        max_sentencepiece_length=8,
        minloglevel=2,
        **(OF_BPE if model_type == "bpe" else {}),
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentence_piece_metadata(
    model: sentencepiece.SentencePieceProcessor, **changes: Any
) -> dict[str, Any]:
    def kind(i: int) -> int:
        if model.IsUnknown(i):
            return UNKNOWN
        if model.IsByte(i):
            return BYTE
        if model.IsControl(i):
            return CONTROL
        return USER_DEFINED if model.IdToPiece(i) in USER_SYMBOLS else NORMAL

    ids = range(model.GetPieceSize())
    return {
        f"tokenizer.ggml.{key}": value
        for key, value in {
            "model": "llama",
            "pre": "default",
            "tokens": [
                # the conversion writes its users' tokens with spaces
                model.IdToPiece(i).replace("▁", " " if kind(i) == USER_DEFINED else "▁")
                for i in ids
            ],
            "scores": [float(model.GetScore(i)) for i in ids],
            "token_type": [kind(i) for i in ids],
            "unknown_token_id": model.unk_id(),
            "bos_token_id": model.bos_id(),
            "eos_token_id": model.eos_id(),
            **changes,
        }.items()
    }


USER_SYMBOLS = ["▁▁", "▁▁▁▁", "\n\n", "<user>"]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentence_piece_ids_are_those_of_its_own_encoder(has_prefix: bool, tmp_path: Path) -> None:
    """Llama 2's kind, with a space before the text; Gemma's, without it and with symbols of its
    users for runs of spaces.
    """
    options = {} if has_prefix else {"user_defined_symbols": USER_SYMBOLS}
    original = trained(add_dummy_prefix=has_prefix, **options)
    ours = built(tmp_path, sentence_piece_metadata(original, add_space_prefix=has_prefix))
    marks = ("<s>", "</s>", "<unk>")  # its encoder does not look for these in a text
    given = [t for t in texts(4000) if t and "\0" not in t and not any(m in t for m in marks)]
    assert len(given) > 2500
    for text in given:
        expected = original.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == expected, repr(text)
        assert ours.encode(text).ids == [original.bos_id(), *expected]
        assert ours.decode(expected, skip_special_tokens=False) == original.decode(expected)


def test_merges_may_be_listed_instead_of_scores(tmp_path: Path) -> None:
    """Gemma 4's files have both; the merges count."""
    by_score = built(tmp_path, sentence_piece_metadata(trained(), add_space_prefix=False))
    merges = json.loads(by_score.to_str())["model"]["merges"]
    metadata = sentence_piece_metadata(
        trained(),
        merges=[" ".join(pair) for pair in merges],
        scores=[-1000.0] * by_score.get_vocab_size(),
        add_space_prefix=False,
    ) | {"tokenizer.ggml.model": "gemma4"}
    ours = built(tmp_path, metadata)
    for text in texts(500):
        assert ours.encode(text).ids == by_score.encode(text).ids
    with pytest.raises(ModelLoadError, match="tokenizer.ggml.merges has 'ab', which is no pair"):
        built(tmp_path, metadata | {"tokenizer.ggml.merges": ["ab"]})


@pytest.mark.parametrize("kind", ["uncased", "cased", "accents"])
def test_word_piece_ids_are_those_of_the_original(kind: str, tmp_path: Path) -> None:
    """What becomes of capitals and accents follows from the vocabulary, and pairs have types."""
    words = [" ".join(WORD_LINES.split()), "Zürich São Paulo naïve Élan", "straße œuvre żółć"]
    original = save_word_piece(tmp_path, words * 3, kind)
    own = json.loads((tmp_path / "tokenizer.json").read_text())
    values = tokenizer_of_encoder(own, {"type_vocab_size": 2})
    metadata = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    # as llama.cpp's first conversions have it, which left special tokens to be known by their text
    metadata["tokenizer.ggml.token_type"] = [NORMAL] * len(values["tokens"])
    ours = built(tmp_path, metadata | {"general.architecture": "bert"})
    given = [*texts(2000), "ZÜRICH Żółć [MASK] don't e-mail 北京 İstanbul e\u0301", "x" * 101]
    assert differences(ours, original, given) == []
    for text in given[:200]:
        assert ours.encode(text).ids == original.encode(text).ids
        pair, expected = ours.encode(text, "a cat"), original.encode(text, "a cat")
        assert (pair.ids, pair.type_ids) == (expected.ids, expected.type_ids)


def field_of(message: bytes, wanted: int) -> bytes:
    """The first field of that number, which has bytes, in a message of protobuf."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = number()
        if key & 7 == 2:
            size = number()
            if key >> 3 == wanted:
                return message[at : at + size]
            at += size
        elif key & 7 == 0:
            number()
        else:
            at += {1: 8, 5: 4}[key & 7]
    raise AssertionError(f"there is no field {wanted}")


def test_unigram_ids_are_those_of_sentence_piece(tmp_path: Path) -> None:
    """XLM-RoBERTa's kind: characters are normalised by a map in the file, spaces count once."""
    original = trained("unigram", vocab_size=200, hard_vocab_limit=False)
    normalizer_spec = field_of(original.serialized_model_proto(), 3)
    charsmap = field_of(normalizer_spec, 2)
    metadata = sentence_piece_metadata(original, remove_extra_whitespaces=True)
    metadata["tokenizer.ggml.model"] = "t5"
    metadata["tokenizer.ggml.precompiled_charsmap"] = list(charsmap)
    ours = built(tmp_path, metadata | {"general.architecture": "bert"})
    # its encoder does not look for special tokens in a text, and the tokenizers library, as with
    # XLM-RoBERTa's own tokenizer.json, cuts at more kinds of spaces and normalises marks with what
    # they stand on
    others = ("<s>", "</s>", "<unk>", "\0", "\ufffd", *"\x1c\x1d\x1e\x1f\x85")
    given = [*texts(2000), "ﬁne ½ Ａ\u3000b e\u0301"]
    given = [text for text in given if text.strip() and not any(o in text for o in others)]
    assert len(given) > 600
    bos, eos = original.bos_id(), original.eos_id()
    different = []
    for text in given:
        expected = original.encode(text)
        found = ours.encode(text).ids
        if found != [bos, *expected, eos]:
            different.append(text)
    assert different == []
    assert ours.encode("a", "the").ids == [bos, *original.encode("a"), eos, eos] + [
        *original.encode("the"),
        eos,
    ]


def test_tokens_of_phi3_take_the_spaces_behind_them(tmp_path: Path) -> None:
    """Those of its chats, as its tokenizer.json says; a GGUF file does not."""
    metadata = sentence_piece_metadata(trained(control_symbols=["<|user|>"]))
    phi3, llama = (
        built(tmp_path, metadata | {"general.architecture": name}) for name in ("phi3", "llama")
    )
    assert phi3.encode("<|user|>\n the</s>\n").ids == llama.encode("<|user|>the</s>").ids
    assert phi3.encode("<s>\n the").ids == llama.encode("<s>\n the").ids


def test_roles_and_templates(tmp_path: Path) -> None:
    metadata = bundled_metadata() | {
        "tokenizer.chat_template": "{{ a }}",
        "tokenizer.chat_template.tool_use": "{{ b }}",
    }
    assert gguf_tokenizer_config(
        Vocabulary(read_gguf(write_gguf(tmp_path / "m.gguf", metadata)))
    ) == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": [
            {"name": "default", "template": "{{ a }}"},
            {"name": "tool_use", "template": "{{ b }}"},
        ],
    }


def test_a_tokenizer_json_beside_the_file_wins(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", bundled_metadata())
    assert json.loads(tokenizer_json(path))["model"]["type"] == "BPE"
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_json(path) == b"{}"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"model": "rwkv"},
            r"model is 'rwkv' \(RWKV's longest matches\); supported: gpt2 \(byte-level BPE\), "
            r"llama \(SentencePiece BPE\), gemma4 \(SentencePiece BPE with merges\), bert "
            r"\(WordPiece\), t5 \(SentencePiece unigram\); a tokenizer.json beside the file",
        ),
        ({"model": "t5"}, "scores is missing"),
        ({"model": "bert"}, r"unknown_token_id is missing, and there is no token \[UNK\]"),
        ({"model": "new"}, r"model is 'new'; supported: gpt2 "),
        ({"model": 3}, "model must be of type str, got 3"),
        ({"pre": "new"}, "pre is 'new'; supported: default, gpt-2, .*; a tokenizer.json beside"),
        ({"tokens": []}, "tokens is missing or empty"),
        ({"tokens": ["a", "a"], "token_type": []}, "tokens has a token twice"),
        ({"tokens": [1, 2]}, "tokens must list str, got 1"),
        ({"token_type": [1]}, "token_type has 1 entries for 2145 tokens"),
        ({"merges": ["ab"]}, "merges has 'ab', which is no pair"),
        ({"bos_token_id": 2145, "add_bos_token": True}, "bos_token_id is 2145, there are 2145"),
        ({"add_bos_token": 1}, "add_bos_token must be of type bool, got 1"),
        ({"model": "llama"}, "scores is missing"),
        ({"model": "llama", "scores": [1.0]}, "scores has 1 entries for 2145 tokens"),
        ({"model": "llama", "remove_extra_whitespaces": True}, "whitespaces is not supported"),
        (
            {"model": "llama", "tokens": ["a" * 300], "token_type": [1], "scores": [1.0]},
            "tokens has a piece of 300 characters",
        ),
    ],
)
def test_unsound_metadata_is_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        built(tmp_path, bundled_metadata(**changes))
