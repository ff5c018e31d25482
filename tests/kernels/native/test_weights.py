"""Memory of packed weights: aligned, disjoint, freed with the last weight."""

from __future__ import annotations

import torch
from quire.kernels.cpu.native import weights
from quire.kernels.cpu.native.weights import empty_weight


def test_weights_are_disjoint_and_aligned():
    sizes = [(3, 5), (1000,), (17, 64), (1,)]
    made = [empty_weight(*size, dtype=torch.bfloat16) for size in sizes]
    for number, weight in enumerate(made):
        weight.fill_(number)
    assert [tuple(weight.shape) for weight in made] == sizes and all(
        weight.data_ptr() % 64 == 0 for weight in made
    )
    assert all((weight == number).all() for number, weight in enumerate(made))


def test_a_large_weight_has_its_own_memory_and_small_ones_share():
    weights._weights.last = None
    small, large, other = (
        empty_weight(count, dtype=torch.uint8) for count in (100, 33 * 2**20, 100)
    )
    assert large.data_ptr() % 2**21 == 0 and other.data_ptr() - small.data_ptr() == 128


def test_memory_is_freed_with_its_last_weight():
    weights._weights.last = None
    first, second = (empty_weight(weights._PIECE_BYTES // 2, dtype=torch.uint8) for _ in range(2))
    second.fill_(7)
    piece = weights._weights.last.memory
    assert piece() is not None
    del first
    assert (second == 7).all()
    del second
    third = empty_weight(weights._PIECE_BYTES // 2 + 1, dtype=torch.uint8)
    assert third.data_ptr() % 2**21 == 0
