"""The limits of this machine that a trace compares kernels with, measured once per process.

Must not know: steps, kernels, what is shown.
"""

from __future__ import annotations

from functools import cache

import torch

from ...ipc.trace import MachineLimits
from ...kernels.cpu.limits import quick_gemm_flops, read_bandwidth

# more than the caches of most machines; small models are read from caches, as in a step
MIN_READ_BYTES, MAX_READ_BYTES = 8 * 2**20, 256 * 2**20
SECONDS = 0.1  # of each measurement; a busy machine interrupts it now and then


@cache
def measured_limits(
    device: torch.device,
    dtype: torch.dtype,
    quantization: str | None,
    weights_bytes: int,
    num_threads: int,
    has_states: bool,
) -> MachineLimits:
    """Memory bandwidth for as many bytes as the weights have, and products in `dtype`; those in
    fp32, too, if there are layers that keep states.
    """
    num_bytes = min(max(weights_bytes, MIN_READ_BYTES), MAX_READ_BYTES)
    if device.type != "cpu":
        return _of_gpu(device, dtype, MAX_READ_BYTES, has_states)
    flops = quick_gemm_flops(dtype, SECONDS)
    int8_ops = quick_gemm_flops(torch.int8, SECONDS) if quantization else 0.0
    fp32_flops = quick_gemm_flops(torch.float32, SECONDS) if has_states else 0.0
    bandwidth = read_bandwidth(num_bytes, num_threads, SECONDS)
    return MachineLimits(bandwidth, flops, max(flops, int8_ops), fp32_flops)


def _of_gpu(
    device: torch.device, dtype: torch.dtype, num_bytes: int, has_states: bool
) -> MachineLimits:
    memory = torch.ones(num_bytes // 4, device=device)
    bandwidth = memory.nbytes / _shortest(memory.sum)

    def flops_in(dtype: torch.dtype) -> float:
        x = torch.ones(4096, 4096, device=device, dtype=dtype)
        return 2 * 4096**3 / _shortest(lambda: x @ x)

    flops = flops_in(dtype)
    return MachineLimits(bandwidth, flops, flops, flops_in(torch.float32) if has_states else 0.0)


def _shortest(function: object) -> float:
    """Seconds of the fastest of some calls on the GPU. The first is not timed."""
    assert callable(function)
    function()
    best = float("inf")
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best
