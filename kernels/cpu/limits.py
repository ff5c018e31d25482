"""Measures this machine's limits: memory bandwidth and matrix-product throughput of its threads.

Must not know: models, requests, what the limits are compared with.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

from .. import registry

# A shape is (rows, in, out). It is large enough for any blocking and small enough for the cache.
GEMM_SHAPES = ((512, 2048, 2048), (1024, 1024, 4096))
QUICK_SHAPE = (256, 1024, 1024)
PIECE_BYTES = 8 * 2**20


def read_bandwidth(num_bytes: int, num_threads: int, seconds: float) -> float:
    """Returns the best rate in bytes per second at which threads read `num_bytes` repeatedly.

    Data that fits the caches is read from them, as weights would be. Each thread reads its own
    part, piece by piece: other programs take a core away for longer than a piece takes.
    """
    size = max(num_bytes // num_threads // 4, 1)
    together = threading.Barrier(num_threads)

    def own_rate(_: int) -> float:
        pieces = torch.ones(size, dtype=torch.float32).split(PIECE_BYTES // 4)
        best = [float("inf")] * len(pieces)
        together.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or best[-1] == float("inf"):
            for i, piece in enumerate(pieces):
                start = time.perf_counter()
                piece.sum()
                best[i] = min(best[i], time.perf_counter() - start)
        return pieces[0].nbytes / statistics.median(best[: size * 4 // PIECE_BYTES or 1])

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            return sum(pool.map(own_rate, range(num_threads)))
    finally:
        torch.set_num_threads(before)


class Reader:
    """Reads `num_bytes` of memory with torch's threads, alternating with another measurement."""

    def __init__(self, num_bytes: int):
        self._memory = torch.ones(max(num_bytes // 4, 1), dtype=torch.float32)

    def rates(self, count: int) -> list[float]:
        """Returns the bytes per second of `count` consecutive reads. One read before them is not
        timed.
        """
        return _rates(self._memory.sum, self._memory.nbytes, count)


class Multiplier:
    """Multiplies matrices in the fastest available way for one of `dtypes`, with the current
    threads.

    Runs alternate with another measurement.
    """

    @torch.inference_mode()
    def __init__(self, dtypes: Iterable[torch.dtype], seconds: float):
        """The search for the fastest way takes about `seconds`."""
        products = [product for dtype in dtypes for product in _products(dtype)]
        self._x, self._columns_out, self._multiply = max(
            products, key=lambda product: _flops(*product, seconds / len(products))
        )

    @torch.inference_mode()
    def rates(self, count: int) -> list[float]:
        """Returns the operations per second of `count` consecutive products. One product before
        them is not timed.
        """
        return _rates(
            lambda: self._multiply(self._x), 2 * self._x.numel() * self._columns_out, count
        )


def gemm_flops(dtype: torch.dtype, seconds: float) -> float:
    """Returns the operations per second of the fastest matrix product available in `dtype`, which
    may be int8.

    Candidates are torch's products and the registry's own, with the current threads.
    """
    return max(_flops(*product, seconds / 4) for product in _products(dtype))


def quick_gemm_flops(dtype: torch.dtype, seconds: float) -> float:
    """Works as gemm_flops, from one small product, within a tenth of a second and less exactly."""
    shapes = (QUICK_SHAPE,)
    products = list(_int8_products(shapes) if dtype == torch.int8 else _products(dtype, shapes))
    return max(_flops(*product, seconds / len(products)) for product in products)


def _products(dtype: torch.dtype, shapes: Iterable[tuple[int, int, int]] = GEMM_SHAPES):
    """Yields (x, columns of the product, function that multiplies), skipping what this processor
    lacks.
    """
    if dtype == torch.int8:
        yield from _int8_products(shapes)
        return
    pack_linear = registry.select("cpu", dtype).pack_linear
    emulated = dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for rows, columns_in, columns_out in shapes:
        x = torch.randn(rows, columns_in).to(dtype)
        weight = torch.randn(columns_out, columns_in).to(dtype)
        yield x, columns_out, pack_linear(weight, None)
        if not emulated:
            yield x, columns_out, lambda x, weight=weight: F.linear(x, weight)


def _int8_products(shapes: Iterable[tuple[int, int, int]] = GEMM_SHAPES):
    """The registry's own product takes x as bfloat16 and quantizes it."""
    pack = registry.select("cpu", torch.bfloat16).pack_quantized_linear
    for rows, columns_in, columns_out in shapes:
        yield (
            torch.randn(rows, columns_in).bfloat16(),
            columns_out,
            pack(torch.randn(columns_out, columns_in).bfloat16(), None, 8),
        )
        if torch.cpu._is_vnni_supported():
            x, weight = (
                torch.randint(-127, 128, size, dtype=torch.int8)
                for size in ((rows, columns_in), (columns_out, columns_in))
            )
            yield x, columns_out, lambda x, weight=weight: torch.ops.aten._int_mm(x, weight.T)


@torch.inference_mode()
def _flops(
    x: torch.Tensor,
    columns_out: int,
    multiply: Callable[[torch.Tensor], torch.Tensor],
    seconds: float,
) -> float:
    return 2 * x.numel() * columns_out / _shortest(lambda: multiply(x), seconds)


def _rates(function: Callable[[], object], amount: float, count: int) -> list[float]:
    """Returns `amount` divided by the seconds of each of `count` consecutive runs. One run before
    is not timed.
    """
    function()
    rates = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        rates.append(amount / (time.perf_counter() - start))
    return rates


def _shortest(function: Callable[[], object], seconds: float) -> float:
    """Returns the shortest of the runs that fit `seconds`, at least two. The first is not timed."""
    function()
    best, end = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best
