"""Which layers share pages of the KV cache, and when windows keep the whole context."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quire.executor.kv_cache_memory import KVCacheMemory, move_caches, release_caches
from quire.executor.runner.block_mover import caches_of
from quire.tests.fakes import make_config

CPU = torch.device("cpu")


def make_layers(*windows: int, **fields) -> list[SimpleNamespace]:
    shape = {"num_kv_heads": 2, "head_dim": 8, "kv_cache_group": 0, **fields}
    return [SimpleNamespace(sliding_window=window, **shape) for window in windows]


def make_memory(layers: list[SimpleNamespace], **arguments) -> KVCacheMemory:
    return KVCacheMemory(layers, make_config(**arguments), torch.float32, CPU)


def test_layers_of_different_groups_share_their_pages():
    layers = make_layers(20, 0, 20, 0, 20)
    memory = make_memory(layers)
    assert memory.groups.windows == (0, 20, 20)
    page = 2 * 16 * 2 * 8 * 4  # keys and values, tokens, heads, numbers, bytes
    assert memory.block_bytes(layers) == 2 * page
    memory.bind(layers, 7)
    assert [layer.kv_cache_group for layer in layers] == [1, 0, 1, 0, 2]
    addresses = [layer.key_cache.data_ptr() for layer in layers]
    assert addresses[0] == addresses[1] == addresses[4] != addresses[2] == addresses[3]
    assert all(layer.value_cache.shape == (7, 16, 2, 8) for layer in layers)
    host = memory.host_caches(layers, 3)
    assert [cache.shape for cache in host] == [(3, 16, 2, 8)] * 4
    others = make_layers(20, 0, 20, 0, 20)
    move_caches(layers, others)
    assert [layer.kv_cache_group for layer in others] == [1, 0, 1, 0, 2]
    assert [layer.key_cache.data_ptr() for layer in others] == addresses


def vm_flags(address: int) -> list[str]:
    """Of the mapping that contains the address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            is_inside = begin <= address < end
        elif is_inside and first == "VmFlags:":
            return rest
    raise AssertionError(f"no mapping contains {address:#x}")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")
def test_huge_pages_begin_behind_the_first_blocks():
    layers = make_layers(0, 0)
    make_memory(layers).bind(layers, 3000)  # 3 MB of keys, and of values
    for layer in layers:
        for cache in (layer.key_cache, layer.value_cache):
            first, last = cache.data_ptr(), cache.data_ptr() + cache.nbytes - 1
            assert "hg" not in vm_flags(first) and "hg" not in vm_flags(first + 2**21 - 4096)
            assert "hg" in vm_flags(last)


def test_a_layer_binds_its_part_of_the_cache_itself():
    bound = []
    layer = make_layers(0)[0]
    layer.bind_cache = lambda key, value, group: bound.append((key, value, group))
    make_memory([layer]).bind([layer], 7)
    release_caches([layer])
    (keys, values, group), released = bound
    assert keys.shape == values.shape == (7, 16, 2, 8) and group == 0
    assert released == (None, None, 0) and not hasattr(layer, "key_cache")


def test_layers_of_different_sizes_have_parts_of_the_same_blocks():
    layers = make_layers(20, 20, 20) + make_layers(0, head_dim=16)
    memory = make_memory(layers)
    assert memory.groups == (((3,), (0, 1), (2,)), (0, 20, 20))
    assert memory.block_bytes(layers) == 2 * 16 * 2 * 16 * 4
    memory.bind(layers, 3)
    assert [layer.key_cache.shape for layer in layers] == [(3, 16, 2, 8)] * 3 + [(3, 16, 2, 16)]
    for layer in (layers[3], layers[0], layers[1]):  # each numbers what it has of a block
        for number, cache in enumerate((layer.key_cache, layer.value_cache), 2 * layer.head_dim):
            for block in range(3):
                cache[block] = 100 * number + block
    assert not (layers[3].key_cache[:, :8] == 3200).any()  # its memory is that of the others
    (blocks,) = caches_of(layers)
    assert blocks.shape == (3, 2 * 16 * 2 * 16) and blocks.is_contiguous()
    assert [sorted(set(block.tolist())) for block in blocks] == [
        [100 * number + block for number in (16, 17)] for block in range(3)
    ]
    (host,) = memory.host_caches(layers, 5)
    assert host.shape == (5, 2 * 16 * 2 * 16)


def test_one_group_keeps_the_context_of_layers_of_any_size():
    layers = make_layers(20) + make_layers(0, head_dim=16)
    memory = make_memory(layers, disable_hybrid_kv_cache_manager=True)
    assert memory.groups.windows == (0,)
    memory.bind(layers, 3)
    assert layers[0].key_cache.data_ptr() != layers[1].key_cache.data_ptr()
    assert [layer.key_cache.shape[-1] for layer in layers] == [layer.head_dim for layer in layers]
    assert all(layer.key_cache.is_contiguous() for layer in layers)


def test_a_layer_that_cannot_be_told_its_group_keeps_the_context(caplog):
    layers = make_layers(20, 0)
    del layers[0].kv_cache_group
    with caplog.at_level(logging.INFO):
        assert make_memory(layers).groups.windows == (0,)
    assert "kv_cache_group" in caplog.text


def test_one_window_for_all_layers_returns_blocks_whatever_their_shapes(caplog):
    layers = make_layers(20, 20) + make_layers(20, head_dim=16)
    with caplog.at_level(logging.INFO):
        memory = make_memory(layers)
    assert memory.groups.windows == (20,) and "windows of 20 return blocks" in caplog.text
    assert memory.block_bytes(layers) == 2 * 16 * 2 * (8 + 8 + 16) * 4
