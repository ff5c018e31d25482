"""Memory allocated before torch is imported: how much, that weights are placed in it, that the rest
is released.
"""

from __future__ import annotations

import mmap
import subprocess
import sys

import psutil
import pytest
import torch
from quire.executor.weights import early_memory
from quire.frontend.engine_args import EngineArgs
from quire.ipc.memory_plan import quantized_bytes
from quire.kernels.cpu.native import weights

MIB = 2**20


def test_the_matrices_of_a_model_and_their_packed_sizes(tiny):
    shapes = early_memory.matrices(tiny("qwen2"))
    assert sorted(shapes) == sorted(early_memory.matrices(tiny("qwen2", num_shards=4)))
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
from quire.executor.weights import early_memory
from quire.frontend.engine_args import EngineArgs
overrides = {"tie_word_embeddings": sys.argv[2] == "tied"}
args = EngineArgs(sys.argv[1], hf_overrides=overrides, cpu_isa=sys.argv[3])
thread = early_memory.begin(args.create_engine_config())
if thread is not None: thread.join()
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


def test_nothing_is_allocated_if_torch_is_already_imported(tiny):
    config = EngineArgs(
        str(tiny("qwen2")), hf_overrides={"tie_word_embeddings": True}
    ).create_engine_config()
    assert early_memory.begin(config) is None and early_memory.take() is None


def make(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(
        -1, num_bytes + early_memory.HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    early_memory._populate(memory, num_bytes)
    return memory


def test_weights_are_placed_in_it_and_the_rest_is_released():
    weights._last = None
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
    assert weights._last is None and psutil.Process().memory_info().rss - before < 20 * MIB
