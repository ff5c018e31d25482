"""Blocks that fill a tensor stand for the weights that they dequantize to."""

from __future__ import annotations

import pytest
import torch
from quire.executor.weights import packed_rows
from quire.executor.weights.packed_rows import PackedRows, copy_weights, pack_blocks

CPU = torch.device("cpu")


def test_blocks_are_dequantized_into_a_tensor_of_any_shape():
    one = torch.tensor([0.5]).half().view(torch.uint8)
    block = torch.cat([one, torch.arange(32, dtype=torch.uint8)])
    packed, tensor = PackedRows(block.repeat(3, 1), "Q8_0"), torch.zeros(96, dtype=torch.bfloat16)
    copy_weights(tensor, packed)
    assert torch.equal(tensor.view(3, 32), (torch.arange(32) / 2).bfloat16().expand(3, 32))


def test_blocks_without_kernels_are_packed_again():
    packed = PackedRows(torch.full((2, 66), 1, dtype=torch.uint8), "TQ2_0")
    assert packed.for_memory().type == "INT2_128"
    expected = packed.dequantized(torch.float32)
    assert torch.equal(packed.for_memory().dequantized(torch.float32), expected)
    rows = PackedRows(torch.zeros(2, 34, dtype=torch.uint8), "Q8_0")
    assert rows.for_memory() is rows


def test_other_values_are_copied():
    tensor = torch.zeros(5, dtype=torch.bfloat16)
    copy_weights(tensor, torch.arange(5.0))
    assert tensor.tolist() == [0, 1, 2, 3, 4]


def test_only_rows_of_a_file_are_released(monkeypatch: pytest.MonkeyPatch):
    """The others lie beside what the process still uses."""
    parts = [
        PackedRows(torch.zeros(rows, 34, dtype=torch.uint8), "Q8_0", is_mapped)
        for rows, is_mapped in ((3, True), (4, False), (2, True))
    ]
    released: list[int] = []
    monkeypatch.setattr(packed_rows, "release_mapped", lambda rows: released.append(len(rows)))

    def pack(rows, types, bias, dtype):
        return list(map(len, rows)), types, dtype

    expected = ([3, 4, 2], ["Q8_0"] * 3, torch.float32)
    assert pack_blocks(pack, parts, None, torch.float32, CPU) == expected and not released

    def from_parts(rows, types, bias, dtype, release):
        for part in rows:
            release(part[1:])
        return pack(rows, types, bias, dtype)

    pack.from_parts = from_parts
    assert pack_blocks(pack, parts, None, torch.float32, CPU) == expected and released == [2, 1]
