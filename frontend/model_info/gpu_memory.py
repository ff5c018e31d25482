"""How much memory this machine's GPU has, and has free, as NVIDIA's driver says it.

Must not know: torch, what the memory is for.
"""

from __future__ import annotations

import ctypes
from ctypes import byref

from ...ipc.errors import InvalidParameterError

CUDA_LIBRARY = "libcuda.so.1"


def gpu_memory_bytes() -> tuple[int, int]:
    """(free, all) of the first GPU, as a process sees it that uses it: what using it takes is gone
    from the free memory already.

    Raises InvalidParameterError, naming `device`, where there is none.
    """
    try:
        cuda = ctypes.CDLL(CUDA_LIBRARY)
    except OSError:
        raise _no_gpu(f"{CUDA_LIBRARY} is not here") from None
    device, context, free, total = (
        ctypes.c_int(),
        ctypes.c_void_p(),
        ctypes.c_size_t(),
        ctypes.c_size_t(),
    )
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
        raise _no_gpu(f"the driver answers with error {code}")


def _no_gpu(reason: str) -> InvalidParameterError:
    return InvalidParameterError(
        "device",
        f"cuda: no NVIDIA GPU can be asked for its memory ({reason}); name an amount (quire plan "
        f"--memory 80GiB)",
    )
