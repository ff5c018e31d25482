"""The merges of large SentencePiece vocabularies, kept in the user's cache: finding them takes as
long as building the rest of a tokenizer.

Must not know: GGUF files, scores, the tokenizers library.

    <SHA-256 of the pieces>.merges
        SHA-256 of the rest; the indices of all left pieces, then of all right ones, 4 bytes each

An entry that is damaged, or not this user's own (ipc/own_files.py), is ignored and written again.
"""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from ..own_files import UntrustedFileError, read_own, replace_own, user_cache

logger = logging.getLogger(__name__)
LAYOUT = b"2"
MOST_BYTES = 2**28  # of an entry; half a million merges take 4 MiB
LEAST_PIECES = 2**16  # the merges of smaller vocabularies are found in less than 0.2 s


class Merges(Sequence[tuple[str, str]]):
    """(left, right) pairs of pieces, made when they are asked for: as a list, half a million take
    85 MB.
    """

    def __init__(self, pieces: Sequence[str], lefts: array, rights: array):
        """lefts, rights: indices into `pieces`, as many of each."""
        self.pieces, self.lefts, self.rights = pieces, lefts, rights

    def __len__(self) -> int:
        return len(self.lefts)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Merges(self.pieces, self.lefts[index], self.rights[index])
        return self.pieces[self.lefts[index]], self.pieces[self.rights[index]]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        piece = self.pieces.__getitem__
        return zip(map(piece, self.lefts), map(piece, self.rights))


def merges_of(pieces: Sequence[str]) -> Merges:
    """The (left, right) of which both are pieces, for each way to divide a piece in two, in the
    order of `pieces` and of the place of division.
    """
    if len(pieces) < LEAST_PIECES:
        return find_merges(pieces)
    key = sha256(LAYOUT + msgspec.json.encode(pieces)).hexdigest()
    path = user_cache() / "tokenizers" / f"{key}.merges"
    merges = _read(path, pieces)
    if merges is None:
        merges = find_merges(pieces)
        _write(path, merges)
    return merges


def find_merges(pieces: Sequence[str]) -> Merges:
    """As merges_of, without the cache."""
    known = set(pieces)  # finds what is missing faster than a dictionary
    indices = {text: index for index, text in enumerate(pieces)}
    lefts, rights = array("I"), array("I")
    for text in pieces:
        for at in range(1, len(text)):
            if (left := text[:at]) in known and (right := text[at:]) in known:
                lefts.append(indices[left])
                rights.append(indices[right])
    return Merges(pieces, lefts, rights)


def _read(path: Path, pieces: Sequence[str]) -> Merges | None:
    """None if there is no entry, or none that can be used, which is logged."""
    try:
        content = read_own(path, MOST_BYTES)
    except FileNotFoundError:
        return None
    except UntrustedFileError as error:
        logger.warning("%s; it is not read, and written again", error)
        return None
    except OSError as error:
        logger.warning("%s: cannot be read: %s", path, error)
        return None
    digest, rest = content[:32], memoryview(content)[32:]
    if sha256(rest).digest() == digest:
        lefts, rights = array("I"), array("I")
        lefts.frombytes(rest[: len(rest) // 2])
        rights.frombytes(rest[len(rest) // 2 :])
        if sys.byteorder == "big":
            lefts.byteswap()
            rights.byteswap()
        return Merges(pieces, lefts, rights)
    logger.warning("%s: damaged, written again", path)
    return None


def _write(path: Path, merges: Merges) -> None:
    """Writes or replaces the entry. What prevents it is logged: the next start finds them again."""
    lefts, rights = merges.lefts[:], merges.rights[:]
    if sys.byteorder == "big":
        lefts.byteswap()
        rights.byteswap()
    rest = lefts.tobytes() + rights.tobytes()
    try:
        replace_own(path, lambda file: file.writelines([sha256(rest).digest(), rest]))
    except OSError as error:
        logger.info("%s: not kept: %s", path, error)
