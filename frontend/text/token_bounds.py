"""How many tokens a text has at least, known without tokenizing it: so that a text that is far too
long costs nothing.

Must not know: models, requests.

A token stands for at most as many characters as the longest entry of the vocabulary has, if nothing
on the way to it takes characters away: no normalizer that deletes, no pre-tokenizer that drops what
it splits at, no unknown characters that melt into one token or into none, no added token that
swallows the blanks around it. Where any of that is so, or a part is not known here, there is no
bound.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace"})
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def max_token_length(backend: tokenizers.Tokenizer) -> int | None:
    """See above."""
    vocab = backend.get_vocab(with_added_tokens=True)
    splits = _parts(backend.pre_tokenizer, "pretokenizers")
    normalizers = _parts(backend.normalizer, "normalizers")
    added = backend.get_added_tokens_decoder().values()
    is_byte_level = any(part["type"] == "ByteLevel" for part in splits)
    keeps_all = (
        isinstance(backend.model, models.BPE)
        and all(map(_keeps_split, splits))
        and all(map(_keeps_normalized, normalizers))
        and not any(token.lstrip or token.rstrip for token in added)
        and (
            vocab.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
            if is_byte_level
            else backend.model.byte_fallback and vocab.keys() >= BYTE_TOKENS
        )
    )
    return max(map(len, vocab)) if keeps_all else None


def composes(backend: tokenizers.Tokenizer) -> bool:
    """Whether it reads the text in Unicode's composed form, NFC."""
    return any(part["type"] == "NFC" for part in _parts(backend.normalizer, "normalizers"))


def _parts(component: Any, inner: str) -> list[dict[str, Any]]:
    """A component's own description, that of a sequence taken apart."""
    if component is None:
        return []
    described = json.loads(component.__getstate__())
    return described[inner] if described["type"] == "Sequence" else [described]


def _keeps_split(part: dict[str, Any]) -> bool:
    return part["type"] in KEEPING_PRE_TOKENIZERS or (
        part["type"] == "Split" and part["behavior"] != "Removed"
    )


def _keeps_normalized(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        # of an expression one cannot tell
        return len(part["content"]) >= len(part["pattern"].get("String", part["content"] + "x"))
    return part["type"] in ("NFC", "Prepend")
