"""Memory allocated before torch is imported: how much, that weights are placed in it, that the rest
is released.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading

import psutil
import pytest
import torch
from quire.executor.weights import early_memory
from quire.executor.weights.packed_cache import PackedCache, weight_files
from quire.frontend.engine_args import EngineArgs
from quire.ipc.models.memory_plan import quantized_bytes
from quire.kernels.cpu.native import weights
from quire.tests.gguf_checkpoints import write_gguf

MIB = 2**20


def test_the_matrices_of_a_model_and_their_packed_sizes(tiny):
    shapes = early_memory.matrices(weight_files(tiny("qwen2")))
    sharded = weight_files(tiny("qwen2", num_shards=4))
    assert len(sharded) > 1 and sorted(shapes) == sorted(early_memory.matrices(sharded))
    # stored in fp32
    assert all(num_bytes == 4 * rows * columns for rows, columns, num_bytes in shapes)
    numbers, largest = (
        sum(rows * columns for rows, columns, _ in shapes),
        max(shapes, key=lambda shape: shape[2]),
    )
    assert early_memory.packed_bytes(shapes, "bfloat16", None) == (2 * numbers, largest[2])
    assert early_memory.packed_bytes(shapes, "float32", None) == (4 * numbers, largest[2])
    head = quantized_bytes(*largest[:2], 8) - quantized_bytes(*largest[:2], 4)
    assert (
        early_memory.packed_bytes(shapes, "bfloat16", "int4")[0]
        == sum(quantized_bytes(*shape[:2], 4) for shape in shapes) + head
    )


BEGIN = """
import sys
import threading
from quire.executor.weights import early_memory
from quire.executor.weights.packed_cache import weight_files
from quire.frontend.engine_args import EngineArgs
overrides = {"tie_word_embeddings": sys.argv[2] == "tied"}
more = dict(zip(("quantization", "packed_weights_cache"), sys.argv[4:]))
args = EngineArgs(sys.argv[1], hf_overrides=overrides, cpu_isa=sys.argv[3], **more)
for thread in early_memory.begin(args.create_engine_config()): thread.join()
memory = early_memory.take()
is_there, is_taken = memory is not None, early_memory.take() is None
print("torch" in sys.modules, is_there, is_taken, is_there and memory[5])
"""


@pytest.mark.parametrize(
    ("damage", "head", "cpu_isa", "is_there"),
    [
        (None, "tied", "auto", True),
        (None, "tied", "none", False),
        (b"", "tied", "auto", False),
        (b"\x08\0\0\0\0\0\0\0[1, 2, 3", "tied", "auto", False),
    ],
)
def test_a_failed_allocation_is_not_an_error(damage, head, cpu_isa, is_there, tiny, tmp_path):
    directory = tiny("qwen2")
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(
            path.read_bytes() if damage is None or path.suffix != ".safetensors" else damage
        )
    done = subprocess.run(
        [sys.executable, "-c", BEGIN, str(tmp_path), head, cpu_isa],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[:3] == ["False", str(is_there), "True"]


def test_a_gguf_file_has_memory(tiny, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, tiny("qwen2"))
    done = subprocess.run(
        [sys.executable, "-c", BEGIN, str(path), "untied", "auto"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "True", "True", "0"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_kept_packed_weights_need_no_memory(is_kept, tiny, tmp_path):
    model, overrides = str(tiny("qwen2")), {"tie_word_embeddings": True}
    arguments = {"quantization": "int4", "packed_weights_cache": str(tmp_path)}
    config = EngineArgs(model, hf_overrides=overrides, **arguments).create_engine_config()
    if is_kept:
        PackedCache.of(config).path.touch()
    done = subprocess.run(
        [sys.executable, "-c", BEGIN, model, "tied", "auto", *arguments.values()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[1] == str(not is_kept)


@pytest.mark.parametrize("is_cached", [False, True])
def test_files_that_are_not_in_memory_are_read(is_cached, tmp_path, monkeypatch):
    (path := tmp_path / "file").write_bytes(bytes(10**6))
    sent, send = [], os.sendfile
    monkeypatch.setattr(early_memory, "_is_cached", lambda file, size: is_cached)
    monkeypatch.setattr(os, "sendfile", lambda *a: sent.append(send(*a)) or sent[-1])
    early_memory._read_ahead([path, tmp_path / "absent", path])
    assert sent == ([] if is_cached else [10**6])


def test_what_was_written_is_in_memory(tmp_path):
    (path := tmp_path / "file").write_bytes(bytes(10**6))
    with path.open("rb") as file:
        assert early_memory._is_cached(file.fileno(), 10**6)


def test_the_parts_of_a_gguf_file(tmp_path):
    names = [f"model-0000{i}-of-00002.gguf" for i in (1, 2)]
    assert weight_files(tmp_path / names[1]) == [tmp_path / name for name in names]


def test_nothing_is_allocated_if_torch_is_already_imported(tiny):
    config = EngineArgs(
        str(tiny("qwen2")), hf_overrides={"tie_word_embeddings": True}
    ).create_engine_config()
    assert early_memory.begin(config) == [] and early_memory.take() is None
    has_waited = threading.Event()
    # another thread has only begun
    for thread in early_memory.begin(config, wait_for_import=has_waited.set):
        thread.join()
    assert has_waited.is_set()
    assert early_memory.take() is not None


def make(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(
        -1, num_bytes + early_memory.HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    early_memory._populate(memory, num_bytes)
    return memory


def test_weights_are_placed_in_it_and_the_rest_is_released():
    weights._weights.last = None
    before = psutil.Process().memory_info().rss
    with weights.early_memory(make(64 * MIB)):
        first = weights.empty_weight(8 * MIB, dtype=torch.uint8)
        second = weights.empty_weight(40 * MIB, dtype=torch.uint8)  # including a large one
        assert (
            second.data_ptr() - first.data_ptr() == 8 * MIB
            and first.data_ptr() % early_memory.HUGE_PAGE_BYTES == 0
        )
        too_large = weights.empty_weight(17 * MIB, dtype=torch.uint8)
        assert not 0 <= too_large.data_ptr() - first.data_ptr() < 64 * MIB
    first.fill_(1)
    second.fill_(2)
    assert (first == 1).all() and psutil.Process().memory_info().rss - before < 60 * MIB
    other = weights.empty_weight(100, dtype=torch.uint8)
    assert not 0 <= other.data_ptr() - first.data_ptr() < 64 * MIB  # the rest has been released
    del first, second
    assert psutil.Process().memory_info().rss - before < 20 * MIB


def test_a_failed_start_leaks_nothing():
    before = psutil.Process().memory_info().rss
    with pytest.raises(ValueError, match="no model"), weights.early_memory(make(64 * MIB)):
        raise ValueError("no model")
    assert weights._weights.last is None and psutil.Process().memory_info().rss - before < 20 * MIB
