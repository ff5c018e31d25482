"""Seconds of one call, by the GPU's clock and by the host's."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def gpu_seconds(function: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


CALLS = 20  # of a graph
CACHED = 2**27  # bytes, more than twice an H200's L2 cache


class GraphTimer:
    """Measures a call as a decode makes it: within a CUDA graph, so that the host takes no part,
    and with none of its data in the GPU's L2 cache.

    The graph reads CACHED bytes before each of CALLS calls. Another one only reads, and the
    difference of the two is the time of the calls.
    """

    def __init__(self, device: str = "cuda") -> None:
        self._others = torch.zeros(CACHED // 4, device=device)
        self._reads = self._seconds(self._read)

    def seconds(self, function: Callable[[], Any]) -> float:
        """The median of some replays. The call must not wait for the GPU."""

        def read_and_call() -> None:
            self._read()
            function()

        return self._seconds(read_and_call) - self._reads

    def _read(self) -> None:
        self._others.view(-1, 4096).sum(1)

    def _seconds(self, function: Callable[[], None]) -> float:
        for _ in range(2):  # compiles
            function()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                function()
        times = [gpu_seconds(graph.replay) for _ in range(4)]
        return statistics.median(times[1:]) / CALLS


def host_seconds(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
