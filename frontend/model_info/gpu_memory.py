"""Total and free memory of this machine's GPU, as reported by NVIDIA's driver.

Must not know: torch, what the memory is for.
"""

from __future__ import annotations

import ctypes
from ctypes import byref

from ...ipc.errors import InvalidParameterError

CUDA_LIBRARY = "libcuda.so.1"


def gpu_memory_bytes() -> tuple[int, int]:
    """Returns the (free, total) memory of the first GPU in bytes, as seen by a process with a CUDA
    context. The memory of the context itself is already subtracted from the free memory.

    Raises InvalidParameterError for `device` if there is no GPU.
    """
    try:
        cuda = ctypes.CDLL(CUDA_LIBRARY)
    except OSError:
        raise _no_gpu(f"{CUDA_LIBRARY} was not found") from None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _check(cuda.cuInit(0))
    _check(cuda.cuDeviceGet(byref(device), 0))
    _check(cuda.cuDevicePrimaryCtxRetain(byref(context), device))
    try:
        _check(cuda.cuCtxPushCurrent_v2(context))
        try:
            _check(cuda.cuMemGetInfo_v2(byref(free), byref(total)))
        finally:
            cuda.cuCtxPopCurrent_v2(byref(context))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
    return free.value, total.value


def _check(code: int) -> None:
    if code:
        raise _no_gpu(f"the driver returned error {code}")


def _no_gpu(reason: str) -> InvalidParameterError:
    return InvalidParameterError(
        "device",
        f"cuda: the memory of an NVIDIA GPU cannot be read ({reason}); name an amount (quire plan "
        f"--memory 80GiB)",
    )
