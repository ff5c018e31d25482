"""The positions at which the pieces of large SentencePiece vocabularies are cut into merges, kept
in the user's cache: to find them takes as long as to build the rest of a tokenizer.

Must not know: GGUF files, scores, the tokenizers library.

    <SHA-256 of the pieces>.merges
        SHA-256 of the rest; for each piece the number of its cuts and their positions, a byte each

An entry that is damaged is ignored and written again. A writer renames a file of its own, so
readers see whole files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from ..user_cache import user_cache

logger = logging.getLogger(__name__)
LAYOUT = b"1"
LEAST_PIECES = 2**16  # smaller vocabularies are cut in less than 0.2 s

Merges = list[tuple[str, str]]


def merges_of(pieces: Sequence[str]) -> Merges:
    """The (left, right) of which both are pieces, for each way to cut each piece, in the order of
    `pieces` and of the cuts. A piece has at most 256 characters.
    """
    if len(pieces) < LEAST_PIECES:
        return _joined(pieces, find_cuts(pieces))
    key = sha256(LAYOUT + msgspec.json.encode(pieces)).hexdigest()
    path = user_cache() / "tokenizers" / f"{key}.merges"
    cuts = _read(path, len(pieces))
    if cuts is None:
        cuts = find_cuts(pieces)
        _write(path, cuts)
    return _joined(pieces, cuts)


def find_cuts(pieces: Sequence[str]) -> list[bytes]:
    """The positions at which each piece is cut."""
    known = set(pieces)  # finds what is missing faster than a dictionary
    return [
        bytes(at for at in range(1, len(text)) if text[:at] in known and text[at:] in known)
        for text in pieces
    ]


def _joined(pieces: Sequence[str], cuts: list[bytes]) -> Merges:
    return [(text[:at], text[at:]) for text, of_text in zip(pieces, cuts) for at in of_text]


def _read(path: Path, num_pieces: int) -> list[bytes] | None:
    """None if there is no entry, or none that can be used, which is logged."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s: cannot be read: %s", path, error)
        return None
    digest, rest = content[:32], content[32:]
    if sha256(rest).digest() == digest:
        cuts, at = [], 0
        for _ in range(num_pieces):
            end = at + 1 + rest[at]
            cuts.append(rest[at + 1 : end])
            at = end
        return cuts
    logger.warning("%s: damaged, written again", path)
    return None


def _write(path: Path, cuts: list[bytes]) -> None:
    """Writes or replaces the entry. What prevents it is logged: the next start cuts again."""
    rest = b"".join(bytes((len(of_text),)) + of_text for of_text in cuts)
    name = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(".writing", path.name, path.parent)
        with open(descriptor, "wb") as file:
            file.write(sha256(rest).digest() + rest)
        os.replace(name, path)
    except OSError as error:
        logger.info("%s: not kept: %s", path, error)
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
