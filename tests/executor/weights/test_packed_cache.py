"""Entries with packed weights: written whole or not at all, read only as they were written."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path

import msgspec
import pytest
from quire.executor.weights import packed_cache
from quire.executor.weights.packed_cache import PackedCache, StoredArray
from quire.tests.executor.driver import make_config

ARRAYS = {
    "a": StoredArray("uint8", [2, 3], memoryview(bytes(range(6)))),
    "b.weight#scales": StoredArray("float32", [5000], memoryview(bytes(range(200)) * 100)),
}


@pytest.fixture
def model(tiny, tmp_path) -> Path:
    return shutil.copytree(tiny("qwen2"), tmp_path / "model-0.5B")


def entry(model: Path, **arguments) -> PackedCache:
    settings = {"quantization": "int4", "packed_weights_cache": str(model.parent / "cache")}
    cache = PackedCache.of(make_config(model, **{**settings, **arguments}))
    assert cache is not None
    return cache


def contents(cache: PackedCache) -> dict | None:
    arrays = cache.read()
    return arrays and {name: (a.dtype, a.shape, bytes(a.data)) for name, a in arrays.items()}


WRITTEN = {name: (a.dtype, a.shape, bytes(a.data)) for name, a in ARRAYS.items()}


def test_what_is_written_is_read(model, caplog):
    cache = entry(model)
    assert cache.read() is None and caplog.text == ""
    cache.write(ARRAYS)
    assert contents(entry(model)) == WRITTEN
    assert [path.name for path in cache.path.parent.iterdir()] == [cache.path.name]
    assert cache.path.name.startswith("model-0-") and cache.path.name.endswith(".packed")
    assert cache.path.parent.stat().st_mode & 0o777 == 0o700


def test_settings_that_have_an_entry(model):
    config = make_config(model, packed_weights_cache="cache", quantization="int8")
    assert PackedCache.of(config) is not None
    for change in (
        {"packed_weights_cache": None},
        {"quantization": None},
        {"load_format": "dummy"},
        {"device": "cuda"},
    ):
        arguments = {"packed_weights_cache": "cache", "quantization": "int8"} | change
        assert PackedCache.of(make_config(model, **arguments)) is None
    shutil.rmtree(model)
    assert PackedCache.of(config, model / "absent.gguf") is None


def test_settings_with_entries_of_their_own(model):
    caches = [
        entry(model),
        entry(model, quantization="int8"),
        entry(model, dtype="bfloat16"),
    ]
    assert len({cache.path for cache in caches}) == 3
    changed = msgspec.structs.replace(make_config(model).model_config, hf_config={"a": 1})
    config = msgspec.structs.replace(
        make_config(model, quantization="int4", packed_weights_cache=str(model.parent / "cache")),
        model_config=msgspec.structs.replace(changed, quantization="int4"),
    )
    other = PackedCache.of(config)
    assert other is not None and (other.path, other.key != caches[0].key) == (caches[0].path, True)


def test_an_entry_of_other_weights_is_written_again(model, caplog):
    entry(model).write(ARRAYS)
    os.utime(model / "model.safetensors", ns=(0, 0))
    cache = entry(model)
    with caplog.at_level(logging.INFO, logger="quire"):
        assert cache.read() is None
    assert "of other weights or settings" in caplog.text
    cache.write(ARRAYS)
    assert contents(cache) == WRITTEN and len(list(cache.path.parent.iterdir())) == 1


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: b"", "cannot mmap an empty file"),
        (lambda data: data[:40], "it has 40 bytes"),
        (lambda data: b"x" + data[1:], "does not begin as such a file does"),
        (lambda data: data[:8] + b"\xff" * 8 + data[16:], "does not begin as such a file does"),
        (lambda data: data[:60] + b"x" + data[61:], "checksum differs"),
        (lambda data: data[:-1], "bytes, not"),
        (lambda data: data + b"x", "bytes, not"),
    ],
)
def test_a_damaged_entry_is_ignored_with_a_warning(damage, problem, model, caplog):
    cache = entry(model)
    cache.write(ARRAYS)
    cache.path.write_bytes(damage(cache.path.read_bytes()))
    assert cache.read() is None
    assert f"{cache.path}: damaged, written again" in caplog.text and problem in caplog.text
    cache.write(ARRAYS)
    assert contents(cache) == WRITTEN


def test_several_writers_leave_one_whole_entry(model):
    cache = entry(model)
    threads = [threading.Thread(target=cache.write, args=(ARRAYS,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    seen = [contents(cache) for _ in range(100)]
    for thread in threads:
        thread.join()
    assert all(found in (None, WRITTEN) for found in seen) and contents(cache) == WRITTEN
    assert len(list(cache.path.parent.iterdir())) == 1


def test_a_reader_keeps_what_it_has_mapped(model):
    cache = entry(model)
    cache.write(ARRAYS)
    arrays = cache.read()
    cache.write({"a": ARRAYS["b.weight#scales"]})
    assert arrays is not None and bytes(arrays["a"].data) == WRITTEN["a"][2]


def test_a_writer_that_fails_leaves_nothing(model, monkeypatch, caplog):
    cache = entry(model)
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "full")))
    cache.write(ARRAYS)
    assert "packed weights are not kept: [Errno 28] full" in caplog.text
    assert list(cache.path.parent.iterdir()) == []


def test_leftovers_of_dead_writers_are_removed(model):
    cache = entry(model)
    cache.path.parent.mkdir()
    names = [cache.path.with_name(f"{name}{packed_cache.TEMPORARY}") for name in ("old", "new")]
    for path in names:
        path.touch()
    os.utime(names[0], (0, 0))
    cache.write(ARRAYS)
    assert [path.exists() for path in names] == [False, True]


def test_a_full_disk_and_a_file_in_place_of_the_directory(model, monkeypatch, caplog):
    cache = entry(model)
    usage = shutil.disk_usage(model)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        cache.write(ARRAYS)
    assert "bytes, 100 are free" in caplog.text and cache.read() is None
    cache.path.parent.rmdir()
    cache.path.parent.touch()
    cache.write(ARRAYS)
    assert caplog.text.count("packed weights are not kept") == 2
