"""The line of the log that says where the time of a load went."""

from __future__ import annotations

import logging
import mmap
import re
import threading
import time

import pytest
import torch
from quire.executor.weights import load_times
from quire.executor.weights.load_times import LoadTimes
from quire.tests.executor.driver import start_executor

LINE = re.compile(
    r"weights: [\d.]+ GB in ([\d.]+) s \([\d.]+ GB/s\): "
    r"read ([\d.]+) s, convert ([\d.]+) s, other (-?[\d.]+) s"
)


def test_the_parts_add_up(caplog):
    times = LoadTimes()
    with times.converting():
        time.sleep(0.05)
    time.sleep(0.05)
    with caplog.at_level(logging.INFO, logger="quire"):
        times.log()
    total, read, convert, other = map(float, LINE.search(caplog.text).groups())
    assert read == 0 and convert >= 0.05 and other >= 0.05
    assert total == pytest.approx(read + convert + other, abs=0.02)


def test_pages_are_mapped_and_unchanged(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    pairs = [("a", whole[5000:900_001]), ("b", whole[:10]), ("c", whole)]
    times = LoadTimes()
    assert list(times.reading(iter(pairs))) == pairs
    assert times.num_bytes == 895_001 + 10 + len(whole)
    assert whole[5000:5003].tolist() == [136, 137, 138]


def test_the_next_tensor_is_read_while_one_is_converted(monkeypatch):
    read = {name: threading.Event() for name in "ab"}
    tensors = {name: torch.zeros(1) for name in read}
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}
    monkeypatch.setattr(load_times, "map_pages", lambda t: read[names[t.data_ptr()]].set())
    pairs = LoadTimes().reading(tensors.items())
    assert next(pairs)[0] == "a"
    assert read["b"].wait(60)
    assert [name for name, _ in pairs] == ["b"]


def test_an_error_of_the_reader_is_the_loads():
    with pytest.raises(ValueError, match="no file"):
        list(LoadTimes().reading(failing()))


def failing():
    yield "a", torch.zeros(1)
    raise ValueError("no file")


def test_a_load_logs_it_once(tiny, caplog):
    with caplog.at_level(logging.INFO, logger="quire"):
        start_executor(tiny("qwen2"))
    assert len(LINE.findall(caplog.text)) == 1
