"""Merges of a vocabulary from the cache are those that are found without it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from quire.ipc.models import merge_cache
from quire.ipc.models.merge_cache import find_merges, merges_of

RANDOM = random.Random(4)
PIECES = sorted({"".join(RANDOM.choices("abcä▁\0", k=RANDOM.randint(1, 9))) for _ in range(3000)})
PIECES += ["a" * 250, "a" * 256, *("a" * n for n in range(10, 20))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, used for every vocabulary."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(merge_cache, "LEAST_PIECES", 1)
    return tmp_path / "quire" / "tokenizers"


def entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def test_what_was_written_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = set(PIECES)
    expected = [
        (piece[:at], piece[at:])
        for piece in PIECES
        for at in range(1, len(piece))
        if {piece[:at], piece[at:]} <= known
    ]
    found = merges_of(PIECES)
    assert list(found) == expected and len(found) == len(expected) > 1000
    assert found[-1] == expected[-1] and list(found[5:9]) == expected[5:9]
    assert [path.suffix for path in entries(folder)] == [".merges"]
    monkeypatch.setattr(merge_cache, "find_merges", None)  # nothing is found again
    assert list(merges_of(PIECES)) == expected
    monkeypatch.setattr(merge_cache, "find_merges", find_merges)
    fewer = [piece for piece in PIECES if piece != "a"]
    assert list(merges_of(fewer)) == [merge for merge in expected if "a" not in merge]
    assert len(entries(folder)) == 2


@pytest.mark.parametrize("damage", [b"", b"x", "a bit", "an end"])
def test_a_damaged_entry_is_written_again(
    folder: Path, damage: bytes | str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = list(merges_of(PIECES))
    (path,) = entries(folder)
    whole = path.read_bytes()
    changed = {"a bit": whole[:-1] + bytes((whole[-1] ^ 1,)), "an end": whole[:-1]}
    path.write_bytes(damage if isinstance(damage, bytes) else changed[damage])
    assert list(merges_of(PIECES)) == expected and "damaged" in caplog.text
    assert path.read_bytes() == whole and entries(folder) == [path]


def test_a_folder_that_cannot_be_made_is_not_an_error(folder: Path) -> None:
    folder.parent.write_text("a file")
    assert list(merges_of(["a", "b", "ab"])) == [("a", "b")]


def test_small_vocabularies_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_cache, "LEAST_PIECES", len(PIECES) + 1)
    assert merges_of(PIECES) and not folder.exists()
