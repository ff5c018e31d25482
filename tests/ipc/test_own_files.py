"""Files that Quire wrote itself are read only if nobody else can have changed them; otherwise they
are written again. The same for every user of ipc/own_files.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from quire.executor.offload.block_store import BlockStore, StoreError
from quire.executor.weights.packed_cache import PackedCache, StoredArray, checksum
from quire.ipc.models import merge_cache
from quire.ipc.models.merge_cache import Merges, merges_of
from quire.ipc.own_files import UntrustedFileError, open_own, read_own, replace_own, user_cache
from quire.tests.executor.driver import make_config
from quire.tests.tiny_models import save_tiny_model

NOBODY = 65534


class User(NamedTuple):
    """write: makes the file, or makes it again. read: whether it finds in the file what was written
    there; never another content.
    """

    path: Path
    write: Callable[[], None]
    read: Callable[[], bool]


def packed_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    data = bytes(range(250)) * 21_000  # some megabytes, and no multiple of a page
    arrays = {name: StoredArray("uint8", [len(data)], memoryview(data)) for name in "ab"}
    settings = {"quantization": "int4", "packed_weights_cache": str(folder)}
    cache = PackedCache.of(make_config(save_tiny_model(folder / "model"), **settings))
    assert cache is not None

    def read() -> bool:
        if (found := cache.read()) is None:
            return False
        assert {name: bytes(array.data) for name, array in found.items()} == dict.fromkeys(
            "ab", data
        )
        return True

    return User(cache.path, lambda: cache.write(arrays), read)


def merges_of_a_vocabulary(folder: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(merge_cache, "LEAST_PIECES", 1)
    pieces = ["a", "b", "ab", "ba", "aba", "bab"]
    expected = list(merges_of(pieces))
    [path] = (folder / "quire/tokenizers").iterdir()

    def read() -> bool:
        found: Merges | None = merge_cache._read(path, pieces)
        assert found is None or list(found) == expected
        return found is not None

    return User(path, lambda: merges_of(pieces) and None, read)


def offloaded_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    path, name, size = folder / "blocks.kv", b"n" * 32, 5000
    content = bytes(range(250)) * 20

    def open_store() -> BlockStore:
        return BlockStore(path, 200_000, size, b"i" * 32)

    def write() -> None:
        store = open_store()
        assert store.write([(name, [memoryview(content)])]) == 1
        store.close()

    def read() -> bool:
        store, found = open_store(), bytearray(size)
        is_there = store.read([(name, [memoryview(found)])]) == 1
        store.close()
        assert not is_there or bytes(found) == content
        return is_there

    return User(path, write, read)


def flip(path: Path) -> None:
    """A byte in the middle of what was written."""
    content = bytearray(path.read_bytes())
    filled = [i for i, byte in enumerate(content) if byte]
    content[filled[len(filled) // 2]] ^= 0x10
    path.write_bytes(content)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FAULTS: dict[str, Callable[[Path], None]] = {
    "a flipped byte": flip,
    "another owner": lambda path: os.chown(path, NOBODY, NOBODY),
    "mode 0666": lambda path: path.chmod(0o666),
    "mode 0620": lambda path: path.chmod(0o620),
    "a link": link,
    "a pipe": make_pipe,
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("make", [packed_weights, merges_of_a_vocabulary, offloaded_blocks])
def test_what_others_may_have_changed_is_not_read_and_is_written_again(
    make: Callable[[Path, pytest.MonkeyPatch], User],
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if fault == "another owner" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    user = make(tmp_path, monkeypatch)
    user.write()
    assert user.read()
    FAULTS[fault](user.path)
    caplog.clear()
    reader = threading.Thread(target=lambda: found.append(user.read()), daemon=True)
    found: list[bool] = []
    reader.start()
    reader.join(60)
    assert found == [False]
    # an empty store is one that was never filled
    assert str(user.path) in caplog.text or (fault, make) == ("empty", offloaded_blocks)
    user.write()
    assert user.read() and user.path.is_file() and not user.path.is_symlink()


@pytest.mark.parametrize("fault", ["mode 0666", "a link", "a pipe"])
def test_a_path_that_cannot_be_freed_is_an_error(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a store, which writes where it reads."""
    user = offloaded_blocks(tmp_path, monkeypatch)
    user.write()
    FAULTS[fault](user.path)

    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StoreError, match="cannot be made again: .*Permission denied"):
        user.read()


def test_what_is_there_and_what_is_not(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file"
    with pytest.raises(FileNotFoundError):
        open_own(path)
    replace_own(path, lambda file: file.writelines([b"some", b"thing"]))
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert read_own(path, 9) == b"something"
    with pytest.raises(OSError, match="has 9 bytes, the most is 8"):
        read_own(path, 8)
    with pytest.raises(UntrustedFileError, match="is not a regular file"):
        read_own(path.parent, 8)
    with pytest.raises(ZeroDivisionError):
        replace_own(path, lambda file: 1 // 0)
    assert [one.name for one in path.parent.iterdir()] == ["file"]
    assert read_own(path, 9) == b"something"


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, 2**20, 3 * 2**20 + 4097])
def test_a_checksum_changes_with_any_byte_and_any_page(size: int) -> None:
    data = bytearray(os.urandom(size))
    before = checksum(memoryview(data))
    for at in {0, size // 3, size // 2, size - 1} if size else ():
        data[at] ^= 1
        assert checksum(memoryview(data)) != before
        data[at] ^= 1
    assert checksum(memoryview(data)) == before
    for at in range(0, size, 2**19):
        changed = bytearray(data)
        changed[at : at + 4096] = bytes(len(changed[at : at + 4096]))
        assert checksum(memoryview(changed)) != before
    if size > 2**20:
        moved = data[2**20 : 2**21] + data[: 2**20] + data[2**21 :]
        assert checksum(memoryview(moved)) != before


def test_the_folder_of_caches_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/of/a/user")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert user_cache() == Path("/of/a/user/.cache/quire")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert user_cache() == Path("/cache/quire")
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # as unset
    assert user_cache() == Path("/of/a/user/.cache/quire")
