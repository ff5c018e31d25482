"""Sums and joins among ranks in native code: bits, order, and ranks that do not come.

The ranks are threads, each with its own copy of the library, and so with its own pool of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from quire.kernels.cpu.native.calls import F32, LATE, LOST, Call, Op, Scale, Step
from quire.kernels.cpu.native.library import ExchangeError, Library, library
from quire.kernels.cpu.native.program import recording
from quire.kernels.cpu.native.ranks import NativeExchange, memory_bytes
from quire.kernels.cpu.native.recorder import Unrecordable
from quire.tests.kernels.native.conftest import NEEDS_LIBRARY
from torch import Tensor

pytestmark = pytest.mark.skipif(library is None, reason=NEEDS_LIBRARY)

PART_FLOATS = 10_000


@pytest.fixture(scope="module", params=["avx2", "best"])
def libraries(request, tmp_path_factory) -> Iterator[list[Library]]:
    assert library is not None
    isa = library.isas[0] if request.param == "best" else "avx2"
    directory = tmp_path_factory.mktemp("ranks")
    copies = []
    for rank in range(4):
        path = directory / f"rank{rank}.so"
        shutil.copy(Path(library._dll._name), path)
        copies.append(Library(path))
        copies[-1].use_isa(isa)
    yield copies
    for one in copies:
        one.set_num_threads(1)


class Calls:
    """What NativeExchange needs of a recorder, with tensors that have data."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._kept: list[Tensor] = []  # calls have their addresses

    def empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        self._kept.append(torch.full(tuple(shape), -1, dtype=dtype))
        return self._kept[-1]

    def num_rows(self, x: Tensor) -> int:
        return len(x)

    def submit(self, call: Call, step: Step) -> None:
        self.calls.append(call)

    @property
    def pointers(self) -> ctypes.Array:
        return (ctypes.c_void_p * len(self.calls))(*map(ctypes.addressof, self.calls))


class Group:
    def __init__(self, size: int, timeout_s: float = 60.0, awake_s: float = 1e-6):
        self.memory = torch.zeros(memory_bytes(size, PART_FLOATS), dtype=torch.uint8)
        times = awake_s, timeout_s
        self.ranks = [
            NativeExchange(self.memory, rank, size, PART_FLOATS, *times) for rank in range(size)
        ]

    def set_line_0(self, value: int) -> None:
        self.memory[:4] = torch.frombuffer(bytearray(struct.pack("<I", value)), dtype=torch.uint8)

    @property
    def line_0(self) -> int:
        return int(self.memory[:4].view(torch.int32)[0])


def recorded(make: Callable[[], Any]) -> tuple[Calls, Any]:
    calls = Calls()
    with recording(calls, contextlib.nullcontext()):  # type: ignore[arg-type]
        made = make()
    return calls, made


def on_ranks(
    libraries: list[Library], group: Group, make: Callable[[int, NativeExchange], Any]
) -> list[Any]:
    """Runs what each rank has recorded; the results of `make`."""
    pairs = [recorded(lambda r=r, one=one: make(r, one)) for r, one in enumerate(group.ranks)]
    with ThreadPoolExecutor(len(pairs)) as threads:
        runs = [
            threads.submit(library.run_all, calls.pointers, Step())
            for library, (calls, _) in zip(libraries, pairs)
        ]
        for run in runs:
            run.result(60)
    return [made for _, made in pairs]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_have_the_rounded_sum_in_the_order_of_ranks(
    libraries, size: int, dtype: torch.dtype, num_threads: int
) -> None:
    group = Group(size)
    for one in libraries:
        one.set_num_threads(num_threads, [-1] * num_threads)
    for shape in [(1, 1), (1, 5000), (5, 33), (7, 896), (3, PART_FLOATS), (40, 1000), (0, 8)]:
        for x_dtype in dict.fromkeys((torch.float32, dtype)):
            parts = [torch.randn(shape).to(x_dtype) for _ in range(size)]
            wanted = parts[0].float().clone()
            for part in parts[1:]:
                wanted += part
            for out in on_ranks(libraries, group, lambda r, one: one.all_reduce(parts[r], dtype)):
                assert out.dtype == dtype and torch.equal(out, wanted.to(dtype))


@pytest.mark.parametrize(
    ("num_threads", "dtype"), [(1, torch.float32), (3, torch.float32), (2, torch.bfloat16)]
)
def test_columns_of_different_widths_are_put_side_by_side(libraries, num_threads, dtype) -> None:
    widths, group = [5000, 300, 4097], Group(3)
    for one in libraries:
        one.set_num_threads(num_threads, [-1] * num_threads)
    for num_rows in (0, 1, 2, 7):
        whole = torch.randn(num_rows, sum(widths)).to(dtype)
        parts = whole.split(widths, dim=1)
        for out in on_ranks(libraries, group, lambda r, one: one.all_gather(parts[r], widths)):
            assert out.dtype == dtype and torch.equal(out, whole)


@pytest.mark.parametrize("awake_s", [0.0, 1e-3])
def test_many_exchanges_in_a_run(libraries, awake_s: float) -> None:
    group = Group(2, awake_s=awake_s)
    for one in libraries:
        one.set_num_threads(2, [-1, -1])

    first = [torch.full((30, 500), float(rank + 1)) for rank in range(2)]

    def make(rank: int, one: NativeExchange) -> Tensor:
        x = first[rank]
        for _ in range(20):
            x = one.all_reduce(x, torch.float32)
            half = x[:, :250] if rank == 0 else x[:, 250:]
            x = one.all_gather(half, [250, 250])
        return x

    for _ in range(10):
        for out in on_ranks(libraries, group, make):
            assert torch.equal(out, torch.full((30, 500), 3.0 * 2**19))


def test_counts_may_pass_32_bits(libraries) -> None:
    group = Group(2)
    for rank, one in enumerate(group.ranks):
        one._sequence.value = 2**32 - 3
        at = 64 * (1 + rank)
        group.memory[at : at + 4] = torch.tensor([0xFD, 0xFF, 0xFF, 0xFF], dtype=torch.uint8)
    for _ in range(6):
        ones = torch.ones(2, 3)
        for out in on_ranks(libraries, group, lambda r, one: one.all_reduce(ones, torch.float32)):
            assert out.eq(2).all()


def double(x: Tensor) -> Call:
    """x [1, 8] *= 2"""
    return Scale(op=Op.SCALE, dtype=F32, rows=1, x=x.data_ptr(), x_row=8, size=8, factor=2.0)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_rank_that_does_not_come_ends_the_run_of_others(libraries, num_threads: int) -> None:
    timeout_s = 1.0
    group, x = Group(3, timeout_s), torch.ones(4, 8)
    kept = torch.ones(1, 8)
    for one in libraries:
        one.set_num_threads(num_threads, [-1] * num_threads)

    def run(rank: int) -> None:
        calls, _ = recorded(lambda: group.ranks[rank].all_reduce(x, torch.float32))
        calls.calls.append(double(kept))
        libraries[rank].run_all(calls.pointers, Step())

    begin = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(run, rank) for rank in (0, 1)]:
            with pytest.raises(ExchangeError, match="rank 2 of those .* does not come"):
                one.result(60)
    assert timeout_s <= time.monotonic() - begin < 60 and group.line_0 == LATE + 2
    assert kept.eq(1).all()  # the calls after it have not run
    begin = time.monotonic()
    for rank in (2, 0, 1):  # no later exchange waits
        with pytest.raises(ExchangeError, match="rank 2"):
            run(rank)
    assert time.monotonic() - begin < timeout_s and kept.eq(1).all()
    other = Calls()
    other.calls.append(double(kept))
    libraries[0].run_all(other.pointers, Step())  # a run without an exchange is as before
    assert kept.eq(2).all()


def test_who_waits_is_told_that_a_rank_is_gone(libraries) -> None:
    group, x = Group(2), torch.ones(1, 1)
    calls, _ = recorded(lambda: group.ranks[0].all_reduce(x, torch.float32))
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(libraries[0].run_all, calls.pointers, Step())
        time.sleep(0.1)
        assert not run.done()
        begin = time.monotonic()
        group.set_line_0(LOST)
        with pytest.raises(ExchangeError, match="another rank has failed"):
            run.result(60)
    assert time.monotonic() - begin < 50  # the group's timeout_s is 60


def test_rows_that_no_exchange_holds_are_refused() -> None:
    [one] = Group(1).ranks
    for call in (
        lambda: one.all_reduce(torch.ones(1, PART_FLOATS + 1), torch.float32),
        lambda: one.all_gather(torch.ones(1, 3), [3, PART_FLOATS + 1]),
        lambda: one.all_reduce(torch.ones(1, 0), torch.float32),
    ):
        with pytest.raises(Unrecordable, match="1 to 10000 numbers"):
            recorded(call)
