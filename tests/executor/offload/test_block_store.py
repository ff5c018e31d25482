"""The store of blocks: what is written comes back or is absent, whatever happens to the file, and
whoever else uses it.
"""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from quire.executor.offload import block_store
from quire.executor.offload.block_store import (
    LOG_ENTRIES,
    BlockStore,
    Layout,
    StoreError,
    plan_layout,
)

BLOCK_BYTES = 6000  # not a multiple of a page
IDENTITY = bytes(range(32))


def size_for(num_places: int) -> int:
    return Layout(BLOCK_BYTES, num_places).file_bytes + 4096


def open_store(path: Path | None, num_places: int = 8, identity=IDENTITY, **settings) -> BlockStore:
    store = BlockStore(path, size_for(num_places), BLOCK_BYTES, identity, **settings)
    assert store.num_places == num_places or path is not None
    return store


def name_of(number: int) -> bytes:
    return (number + 1).to_bytes(8, "big") * 4


def content_of(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


def buffers(data: bytes | bytearray) -> list[memoryview]:
    view = memoryview(data)
    return [view[:1000], view[1000:1001], view[1001:]]


def write(store: BlockStore, *numbers: int) -> int:
    return store.write([(name_of(n), buffers(content_of(n))) for n in numbers])


def read(store: BlockStore, *numbers: int) -> int:
    """Return how many of the first come back. They must hold what was written."""
    targets = [bytearray(BLOCK_BYTES) for _ in numbers]
    count = store.read([(name_of(n), buffers(t)) for n, t in zip(numbers, targets)])
    assert targets[:count] == [content_of(n) for n in numbers[:count]]
    store.touch([name_of(n) for n in reversed(numbers[:count])])
    return count


def present(store: BlockStore, most: int = 100) -> set[int]:
    return {n for n in range(most) if name_of(n) in store.names()}


@pytest.fixture(params=["file", "memory"])
def path(request, tmp_path) -> Path | None:
    return tmp_path / "kv" / "store.kv" if request.param == "file" else None


def test_blocks_come_back(path):
    with closing(open_store(path)) as store:
        assert write(store, 1, 2, 3) == 3 and write(store, 2, 4) == 1 and len(store) == 4
        assert read(store, 1, 2, 3, 4) == 4 and read(store, 4) == 1
        assert read(store, 1, 9, 2) == 1 and read(store, 9) == 0
        names = [name_of(n) for n in (1, 2, 9, 3)]
        assert [name in store.names() for name in names] == [True, True, False, True]
        store.remove([name_of(2), name_of(9)])
        assert present(store) == {1, 3, 4}
        store.clear()
        assert len(store) == 0 and read(store, 1) == 0 and write(store, 1) == 1
        assert store.num_corrupt == 0
    store.close()
    assert write(store, 1) == read(store, 1) == 0 and name_of(1) not in store.names()


def test_the_least_recently_used_leave_first(path):
    with closing(open_store(path, 4)) as store:
        write(store, 0, 1, 2, 3)
        read(store, 0)
        write(store, 1)  # it is there, and was used
        write(store, 4)
        assert present(store) == {0, 1, 3, 4}
        write(store, 5)
        assert present(store) == {0, 1, 4, 5}
        # a beginning is of use without its end
        read(store, 0, 1, 4, 5)
        write(store, 6, 7)
        assert present(store) == {0, 1, 6, 7}
        assert write(store, *range(10, 20)) == 4
        assert present(store) == {16, 17, 18, 19}


def test_it_agrees_with_a_model(path):
    rng, model = random.Random(5), []  # numbers, least recently used first
    with closing(open_store(path, 6, tracks_changes=True)) as store:
        known = set()
        for _ in range(400):
            numbers = rng.sample(range(12), rng.randint(1, 4))
            if rng.random() < 0.5:
                there = [n for n in numbers if n in model]
                model = [n for n in model if n not in there] + there
                new = [n for n in numbers if n not in model]
                assert write(store, *numbers) == len(new)
                model = (model + new)[-6:]
            else:
                hits = []
                for n in numbers:
                    if n not in model:
                        break
                    hits.append(n)
                assert read(store, *numbers) == len(hits)
                model = [n for n in model if n not in hits] + hits[::-1]
            assert present(store) == set(model) and len(store) == len(model)
            added, removed = store.take_changes()
            known = (known | set(added)) - set(removed)
            assert known == {name_of(n) for n in model}


def test_a_file_is_kept(tmp_path):
    path = tmp_path / "store.kv"
    with closing(open_store(path)) as store:
        write(store, 1, 2, 3)
    assert path.stat().st_mode & 0o777 == 0o600
    with closing(open_store(path, tracks_changes=True)) as store:
        assert present(store) == {1, 2, 3} and read(store, 1, 2, 3) == 3
        assert {*store.take_changes()[0]} == {name_of(n) for n in (1, 2, 3)}
        assert store.take_changes() == ([], [])


def test_a_file_keeps_its_size(tmp_path, caplog):
    path = tmp_path / "store.kv"
    with closing(open_store(path, 8)) as store:
        write(store, 1)
    with closing(open_store(path, 20)) as store:
        assert store.num_places == 8 and read(store, 1) == 1
    assert "room for 8 blocks, not for 20" in caplog.text


def test_other_blocks_are_never_read(tmp_path, caplog):
    path = tmp_path / "store.kv"
    with closing(open_store(path)) as store:
        write(store, 1)
    with closing(open_store(path, identity=bytes(32))) as store:
        assert present(store) == set()
    assert "is of another model or version, and is emptied" in caplog.text


@pytest.mark.parametrize("seed", range(24))
def test_a_damaged_file_gives_no_wrong_block(tmp_path, seed):
    rng, path = random.Random(seed), tmp_path / "store.kv"
    with closing(open_store(path)) as store:
        write(store, *range(8))
        size = store._layout.file_bytes
    data = bytearray(path.read_bytes())
    assert len(data) == size
    kind = rng.choice(["bit", "bytes", "zeros", "cut", "longer", "table"])
    if kind == "bit":
        data[rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(size) :]
    elif kind == "longer":
        data += b"more"
    else:
        first = rng.randrange(store._layout.blocks_at if kind == "table" else size)
        last = min(size, first + rng.choice([1, 100, 20_000]))
        data[first:last] = bytes(last - first) if kind == "zeros" else rng.randbytes(last - first)
    path.write_bytes(data)
    with closing(open_store(path)) as store:
        for number in range(8):
            assert read(store, number) in (0, 1)  # and what comes back is right
        write(store, *range(20, 28))
        assert read(store, *range(20, 28)) == 8


def test_damage_while_the_file_is_open(tmp_path, caplog):
    path = tmp_path / "store.kv"
    with closing(open_store(path)) as store:
        write(store, 1, 2, 3)
        place = store._places[name_of(2)]
        with path.open("r+b") as file:
            file.seek(store._layout.blocks_at + place * store._layout.stride + 4321)
            file.write(b"\0\1\2")
        assert read(store, 1, 2, 3) == 1 and store.num_corrupt == 1
        assert "is damaged (its checksum is wrong); it counts as absent" in caplog.text
        assert present(store) == {1, 3} and write(store, 2) == 1 and read(store, 1, 2, 3) == 3


@pytest.mark.parametrize("size", [0, 5000, "a byte"])
def test_a_file_that_is_cut_short_while_it_is_open_is_not_touched(tmp_path, caplog, size):
    path = tmp_path / "store.kv"
    with closing(open_store(path, tracks_changes=True)) as store:
        write(store, 1, 2)
        store.take_changes()
        os.truncate(path, path.stat().st_size - 1 if size == "a byte" else size)
        assert name_of(1) not in store.names()
        assert read(store, 1) == 0 and write(store, 3) == 0
        store.clear()
        store.remove([name_of(1)])
        assert {*store.take_changes()[1]} == {name_of(1), name_of(2)}
    assert "not used any more: it was cut short" in caplog.text
    with closing(open_store(path)) as store:
        assert "is cut short, and is emptied" in caplog.text or size == 0
        assert present(store) == set() and write(store, 1) == 1


def test_a_disk_that_fails_is_no_end(tmp_path, caplog, monkeypatch):
    with closing(open_store(tmp_path / "store.kv")) as store:
        write(store, 1)

        def fail(*args):
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(block_store.os, "preadv", fail)
            assert read(store, 1) == 0
            patch.setattr(block_store.os, "pwritev", fail)
            assert write(store, 2) == 0
        assert present(store) == set() and write(store, 3) == 0
    assert "Input/output error" in caplog.text


def test_what_cannot_be_used_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(StoreError, match="no block of 6000 bytes fits"):
        plan_layout(BLOCK_BYTES, 10_000)
    with pytest.raises(OSError):
        open_store(tmp_path)
    monkeypatch.setattr(block_store.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(StoreError, match="cannot be made again: .* belongs to user"):
        open_store(tmp_path / "other.kv")


# ---------------------------------------------------------------- several processes


def test_two_stores_share_a_file(tmp_path):
    path = tmp_path / "store.kv"
    with closing(open_store(path)) as first, closing(open_store(path)) as second:
        write(first, 1, 2)
        assert read(second, 1, 2) == 2
        write(second, *range(10, 16))
        assert present(first) == {1, 2, *range(10, 16)}
        write(second, 20, 21, 22)
        assert present(first) == present(second) and len(first) == 8
        for number in range(LOG_ENTRIES):  # more changes than the log holds
            write(second, 100 + number % 30)
        assert present(first, 200) == present(second, 200)
        first.clear()
        assert present(second, 200) == set() and write(second, 5) == 1
        assert present(first) == {5}


PROGRAM = """
import random, sys
from pathlib import Path
from quire.tests.executor.offload.test_block_store import *
rng, store = random.Random(int(sys.argv[2])), open_store(Path(sys.argv[1]))
print("ready", flush=True)
for _ in range(int(sys.argv[3])):
    numbers = rng.sample(range(20), rng.randint(1, 6))
    (write if rng.random() < 0.6 else read)(store, *numbers)
assert store.num_corrupt == int(sys.argv[4]), store.num_corrupt
"""


def start(path: Path, seed: int, count: int, num_corrupt: int = 0) -> subprocess.Popen:
    words = [sys.executable, "-c", PROGRAM, path, seed, count, num_corrupt]
    process = subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.slow
def test_processes_that_use_a_file_at_once(tmp_path):
    path = tmp_path / "store.kv"
    others = [start(path, seed, 500) for seed in range(2)]
    rng = random.Random(7)
    with closing(open_store(path)) as store:
        while any(process.poll() is None for process in others):
            numbers = rng.sample(range(20), rng.randint(1, 6))
            (write if rng.random() < 0.5 else read)(store, *numbers)
        assert store.num_corrupt == 0
    assert [process.wait() for process in others] == [0, 0]


def test_a_process_that_is_killed_leaves_a_good_file(tmp_path):
    path = tmp_path / "store.kv"
    for seed in range(3):
        other = start(path, seed, 10**9)
        time.sleep(0.02 + 0.03 * seed)
        other.send_signal(signal.SIGKILL)
        other.wait()
        with closing(open_store(path)) as store:
            for number in range(20):
                assert read(store, number) in (0, 1)
            write(store, *range(30, 38))
            assert read(store, *range(30, 38)) == 8


def test_a_process_that_keeps_the_lock_delays_others_once(tmp_path, caplog):
    path = tmp_path / "store.kv"
    with closing(open_store(path)) as first, closing(open_store(path)) as second:
        write(first, 1)
        with first._locked():
            start_time = time.monotonic()
            for _ in range(20):
                assert read(second, 1) == 0 and write(second, 2) == 0
            assert time.monotonic() - start_time < 10
        assert "another process keeps it locked" in caplog.text
        second._paused_until = 0.0
        assert read(second, 1) == 1
