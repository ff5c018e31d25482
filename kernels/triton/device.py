"""Where the Triton implementations run, and what their launches need to know of the device.

Must not know: any operation.
"""

import functools

import torch
import triton
from triton.runtime import driver

from ..registry import Facts

PRIORITY = 20

# Elements that a program of 4 warps moves at once: 8 to each thread, in bf16 one load of 16 bytes.
# 16 such programs fill an SM's 2048 threads with 32 KiB in flight, 4.3 MB on 132 SMs: an H200's 4.8
# TB/s need 2.9 MB if a load takes 600 ns.
TILE = 1024

# Multiply and add are not contracted where that is not written: the interpreter does not, and
# neither does one compilation what another of the same arithmetic does not. These kernels wait for
# memory, not for arithmetic.
PLAIN = {"enable_fp_fusion": False}


def is_cuda(facts: Facts) -> bool:
    return facts.device == "cuda"


def reads_cache(facts: Facts) -> bool:
    return is_cuda(facts) and facts.kv_cache_dtype != torch.int8


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Tensors of the interpreter, in host memory, have one."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


def architecture() -> int:
    """80 for sm_80, 90 for sm_90, ...: of the current device.

    The interpreter stands for the newest.
    """
    return 90 if triton.knobs.runtime.interpret else driver.active.get_current_target().arch
