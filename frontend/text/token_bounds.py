"""A lower bound on the number of tokens of a text without tokenizing it, to reject long texts
cheaply.

Must not know: models, requests.

A token covers at most as many characters as the longest vocabulary entry has, if nothing removes
characters before: no normalizer that deletes, no pre-tokenizer that drops separators, no unknown
characters that merge into one token or none, no added token that strips the spaces around it.
Otherwise, or if a component is unknown here, there is no bound.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace"})
BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))


def max_token_length(backend: tokenizers.Tokenizer) -> int | None:
    """Returns the longest vocabulary entry in characters, or None if there is no bound (see the
    module).
    """
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
    """Whether the tokenizer normalizes text to Unicode's composed form, NFC."""
    return any(part["type"] == "NFC" for part in _parts(backend.normalizer, "normalizers"))


def _parts(component: Any, inner: str) -> list[dict[str, Any]]:
    """The descriptions of a component's parts; of the component itself if it is not a sequence."""
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
        # a regular expression gives no length
        return len(part["content"]) >= len(part["pattern"].get("String", part["content"] + "x"))
    return part["type"] in ("NFC", "Prepend")
