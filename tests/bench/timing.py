"""Seconds of one call, by the GPU's clock and by the host's."""

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


def host_seconds(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
