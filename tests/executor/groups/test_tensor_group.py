"""Sums and joins of ranks: values, bits, and tensors larger than the shared memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from quire.executor.groups import PART_FLOATS
from quire.executor.groups.tensor_group import ALONE, TensorGroup
from quire.executor.ranks.ring import GroupEnds
from quire.executor.ranks.shared_links import SharedExchange
from quire.ipc.errors import InvalidParameterError


def on_ranks(size: int, function) -> list:
    ends = GroupEnds.create(size)
    groups = [TensorGroup(SharedExchange(rank, ends)) for rank in range(size)]
    try:
        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(function, groups))
    finally:
        for fd in ends.fds:
            os.close(fd)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, PART_FLOATS // 2 + 7)])
def test_all_ranks_have_the_sum_in_the_order_of_ranks(size: int, shape) -> None:
    parts = [torch.randn(shape, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    wanted = parts[0].clone()
    for part in parts[1:]:
        wanted += part
    sums = on_ranks(size, lambda group: group.all_reduce(parts[group.rank]))
    assert all(torch.equal(one, wanted) for one in sums)
    assert all(
        torch.equal(part, torch.randn(shape, generator=torch.Generator().manual_seed(r)))
        for r, part in enumerate(parts)
    )  # operands are unchanged


def test_bf16_is_added_in_fp32() -> None:
    parts = [torch.tensor([[256.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 2**-9]]).bfloat16()]
    for one in on_ranks(2, lambda group: group.all_reduce(parts[group.rank])):
        assert one.dtype == torch.float32 and one.tolist() == [[257.0, 1.0 + 2**-9]]


@pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
def test_columns_of_different_widths_are_put_side_by_side(num_rows: int) -> None:
    widths = [100_000, 30_000, 70_001]
    whole = torch.arange(num_rows * sum(widths), dtype=torch.float32).view(num_rows, sum(widths))
    parts = whole.split(widths, dim=1)
    for one in on_ranks(3, lambda group: group.all_gather(parts[group.rank], widths)):
        assert torch.equal(one, whole)


def test_many_operations_in_a_row() -> None:
    def work(group: TensorGroup) -> float:
        x = torch.tensor([float(group.rank + 1)])
        for _ in range(300):
            x = group.all_reduce(x) / 3
            x = group.all_gather(x[:, None], [1, 1]).sum(1) / 2
        return float(x)

    assert len(set(on_ranks(2, work))) == 1


def test_parts() -> None:
    first, second = (TensorGroup(SharedExchange(rank, GroupEnds.create(2))) for rank in range(2))
    assert (first.share(8, "x"), first.share(1, "x"), ALONE.share(7, "x")) == (4, 1, 7)
    assert (first.range_of(8), second.range_of(8)) == ((0, 4), (4, 8))
    assert (first.range_of(64, 64), second.range_of(64, 64)) == ((0, 64), (0, 64))
    assert (first.range_of(256, 64), second.range_of(256, 64)) == ((0, 128), (128, 256))
    assert (first.even_range(7), second.even_range(7)) == ((0, 3), (3, 7))
    last = TensorGroup(SharedExchange(3, GroupEnds.create(4)))
    assert last.range_of(2 * 16, 16) == (16, 32)
    with pytest.raises(InvalidParameterError, match="must divide the model's num_x=3, .* got 2"):
        first.share(3, "num_x")
