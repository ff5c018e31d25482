"""Tokenizers as llama.cpp's conversion writes them into GGUF files, and texts to compare ids on."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from quire.ipc.models.gguf import read_gguf
from quire.ipc.models.gguf_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    gguf_tokenizer,
)
from quire.tests.gguf_files import write_gguf

WORD_LINES = """
the quick brown fox don't WE'LL it's I'M naïve Ünïcödé straße ǅ ʼn e\u0301 ﬁ
123456 3.14 1,000 0x1F ²³ ١٢٣ Ⅷ def f(x): return x**2 {"a": [1, null]} <br/> // /* */
你好世界 これは テスト 한국어 Привет мир שלום مرحبا नमस्ते 😀 👩‍👩‍👧‍👦 🏳️‍🌈 ▁ Ġ <s> <|im_end|>
"""
SPACES = [
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\r\n\r\n", "\t", "   \n ", "\u00a0", "\u3000"),
    *("\u200b", "\u2028", "\0", "\x7f"),
]
WORDS = [*WORD_LINES.split(), *SPACES]


def texts(count: int, seed: int = 0) -> list[str]:
    """Words, code, scripts, spaces and noise, joined at random; runs of spaces of many lengths."""
    rng = random.Random(seed)

    def noise() -> str:
        return rng.randbytes(rng.randint(1, 12)).decode("utf-8", "replace")

    def anything() -> str:
        code = rng.choice([rng.randrange(0x20, 0x3000), rng.randrange(0x3000, 0x1F700)])
        return "" if 0xD800 <= code < 0xE000 else chr(code)

    def number() -> str:
        return str(rng.randrange(10 ** rng.randint(1, 12)))

    def word() -> str:
        return rng.choice([str.lower, str.upper, str.title, str])(rng.choice(WORDS))

    def piece() -> str:
        return rng.choice([word, word, noise, anything, number])()

    return [
        "",
        *(
            rng.choice(["", " "]).join(piece() for _ in range(rng.randint(1, 12)))
            for _ in range(count - 41)
        ),
        *(
            f"{' ' * run}x{space * run}y"
            for run in (2, 3, 7, 8, 31, 32, 40, 70)
            for space in " \t\n"
        ),
        *("\n" * run + " 1" for run in range(16)),
    ]


def metadata_of(own: dict[str, Any], pre: str | None, **changes: Any) -> dict[str, Any]:
    """A tokenizer.json's contents as metadata; pre=None: SentencePiece's kind.

    Ids without a token become unused ones.
    """
    vocab = own["model"]["vocab"] | {token["content"]: token["id"] for token in own["added_tokens"]}
    special = {token["id"]: token["special"] for token in own["added_tokens"]}
    found = {token_id: text for text, token_id in vocab.items()}
    tokens = [found.get(i, f"[PAD{i}]") for i in range(max(found) + 1)]
    merges = [m if isinstance(m, str) else " ".join(m) for m in own["model"]["merges"]]

    def kind(i: int) -> int:
        if i in special:
            is_unknown = pre is None and tokens[i] == own["model"]["unk_token"]
            return UNKNOWN if is_unknown else CONTROL if special[i] else USER_DEFINED
        if i not in found:
            return UNUSED
        return BYTE if pre is None and re.fullmatch("<0x..>", tokens[i]) else NORMAL

    values: dict[str, Any] = {
        "tokens": tokens,
        "token_type": [kind(i) for i in range(len(tokens))],
    }
    if pre is None:
        scores: dict[str, float] = {}
        for rank, merge in enumerate(merges):
            scores.setdefault(merge.replace(" ", ""), -float(rank))
        values |= {"model": "llama", "scores": [scores.get(token, -1e9) for token in tokens]}
    else:
        values |= {"model": "gpt2", "pre": pre, "merges": merges}
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


def built(folder: Path, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    content = gguf_tokenizer(Vocabulary(read_gguf(write_gguf(folder / "m.gguf", metadata))))
    return tokenizers.Tokenizer.from_str(msgspec.json.encode(content, enc_hook=list).decode())


def differences(
    ours: tokenizers.Tokenizer, original: tokenizers.Tokenizer, given: list[str]
) -> list[str]:
    """The texts whose ids, or whose text after encoding and decoding, differ."""
    pairs = [
        tokenizer.encode_batch(given, add_special_tokens=False) for tokenizer in (ours, original)
    ]
    ids = [encoding.ids for encoding in pairs[1]]
    decoded = [t.decode_batch(ids, skip_special_tokens=False) for t in (ours, original)]
    return [
        text
        for text, a, b, c, d in zip(given, *pairs, *decoded, strict=True)
        if a.ids != b.ids or c != d
    ]
