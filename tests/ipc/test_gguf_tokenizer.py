"""Tokenizers from GGUF metadata: the same ids as the tokenizer that the metadata was made from."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sentencepiece
import tokenizers
from quire.frontend.model_info.model_files import find_model_directory
from quire.ipc.errors import ModelLoadError
from quire.ipc.gguf import read_gguf
from quire.ipc.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    PRE_TOKENIZERS,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    gguf_tokenizer,
    gguf_tokenizer_config,
    tokenizer_json,
)
from quire.tests.gguf_files import write_gguf
from tokenizers import pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

BUNDLED = find_model_directory("bundled") / "tokenizer.json"
# as the models' own tokenizer.json files have it
LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORD_LINES = """
the quick brown fox don't WE'LL it's I'M naïve Ünïcödé straße ǅ ʼn e\u0301 ﬁ
123456 3.14 1,000 0x1F ²³ ١٢٣ Ⅷ def f(x): return x**2 {"a": [1, null]} <br/> // /* */
你好世界 これは テスト 한국어 Привет мир שלום مرحبا नमस्ते 😀 👩‍👩‍👧‍👦 🏳️‍🌈 ▁ Ġ <s> <|im_end|>
"""
SPACES = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "   \n ",
    "\u00a0",
    "\u3000",
    "\u200b",
    "\0",
    "\x7f",
]
WORDS = [*WORD_LINES.split(), *SPACES, "\0", "\x7f"]


def texts(count: int, seed: int = 0) -> list[str]:
    """Words, code, scripts, spaces and noise, joined at random."""
    rng = random.Random(seed)

    def noise() -> str:
        return rng.randbytes(rng.randint(1, 12)).decode("utf-8", "replace")

    def anything() -> str:
        code = rng.choice([rng.randrange(0x20, 0x3000), rng.randrange(0x3000, 0x1F700)])
        return "" if 0xD800 <= code < 0xE000 else chr(code)

    def piece() -> str:
        return rng.choice([lambda: rng.choice(WORDS), noise, anything])()

    return [
        "",
        *(
            rng.choice(["", " "]).join(piece() for _ in range(rng.randint(1, 12)))
            for _ in range(count - 1)
        ),
    ]


def bundled_metadata(**changes: Any) -> dict[str, Any]:
    """The bundled tokenizer as llama.cpp's conversion writes it."""
    own = json.loads(BUNDLED.read_text())
    tokens = sorted(own["model"]["vocab"], key=own["model"]["vocab"].get)
    special = {token["content"] for token in own["added_tokens"]}
    return {
        "general.architecture": "qwen2",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, "[PAD2144]"],
        "tokenizer.ggml.token_type": [CONTROL if t in special else NORMAL for t in tokens]
        + [UNUSED],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in own["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def built(tmp_path: Path, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    content = gguf_tokenizer(read_gguf(write_gguf(tmp_path / "m.gguf", metadata)))
    return tokenizers.Tokenizer.from_str(msgspec.json.encode(content).decode())


def split_by(regex: str) -> list[Any]:
    return [
        pre_tokenizers.Split(tokenizers.Regex(regex), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
ORIGINALS = {  # pre-tokenizer, whether the text is composed, merges of whole words ignored
    "gpt-2": ([GPT2], False, False),
    "smollm": ([pre_tokenizers.Digits(individual_digits=True), GPT2], False, False),
    "qwen2": (split_by(PRETOKENIZE_REGEX), True, False),
    "llama-bpe": (split_by(LLAMA3_REGEX), False, True),
    "gpt-4o": (split_by(GPT4O_REGEX), False, False),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_byte_level_ids_are_the_original_ones(name: str, tmp_path: Path) -> None:
    steps, composes, ignores_merges = ORIGINALS[name]
    original = tokenizers.Tokenizer.from_file(str(BUNDLED))
    original.pre_tokenizer = pre_tokenizers.Sequence(steps)
    original.model.ignore_merges = ignores_merges
    if composes:
        original.normalizer = tokenizers.normalizers.NFC()
    ours = built(tmp_path, bundled_metadata(pre=name, add_bos_token=False))
    for text in texts(2000):
        expected = original.encode(text).ids
        assert ours.encode(text).ids == expected, repr(text)
        assert ours.decode(expected, skip_special_tokens=False) == original.decode(
            expected, skip_special_tokens=False
        )
    assert ours.get_added_tokens_decoder() == original.get_added_tokens_decoder()


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


def trained(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    rng, words = random.Random(1), WORD_LINES.split()
    lines = [" ".join(rng.choices(words, k=10)) for _ in range(2000)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
        max_sentencepiece_length=8,
        minloglevel=2,
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
            "tokens": [model.IdToPiece(i) for i in ids],
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


def test_roles_and_templates(tmp_path: Path) -> None:
    metadata = bundled_metadata() | {
        "tokenizer.chat_template": "{{ a }}",
        "tokenizer.chat_template.tool_use": "{{ b }}",
    }
    assert gguf_tokenizer_config(read_gguf(write_gguf(tmp_path / "m.gguf", metadata))) == {
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
        ({"model": "rwkv"}, "model is 'rwkv'; supported: gpt2, llama"),
        ({"model": 3}, "model must be of type str, got 3"),
        ({"pre": "default"}, "pre is 'default'; supported: gpt-2, llama-bpe"),
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


def test_every_named_pre_tokenizer_builds(tmp_path: Path) -> None:
    for name in PRE_TOKENIZERS:
        tokenizer = built(tmp_path, bundled_metadata(pre=name))
        for text in texts(100):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            composed = text if name != "qwen2" else tokenizer.normalizer.normalize_str(text)
            assert tokenizer.decode(ids, skip_special_tokens=False) == composed
