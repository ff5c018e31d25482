"""Says where the Triton implementations run, and states the facts about the device that their
launches need.

Must not know: any operation.
"""

import functools

import torch
import triton
from triton.runtime import driver

from ..registry import Facts

PRIORITY = 20

# A program of 4 warps moves so many elements at once: 8 per thread, which in bf16 is one load of 16
# bytes. 16 such programs fill an SM's 2048 threads with 32 KiB in flight, 4.3 MB on 132 SMs. An
# H200's 4.8 TB/s need 2.9 MB in flight if a load takes 600 ns.
TILE = 1024

# Disables the contraction of a multiply and an add. The interpreter does not contract, and two
# compilations of the same arithmetic may contract differently. These kernels are limited by memory,
# so the arithmetic costs no time.
PLAIN = {"enable_fp_fusion": False}


def is_cuda(facts: Facts) -> bool:
    return facts.device == "cuda"


def multiplies_fp8(facts: Facts) -> bool:
    """Whether the tensor cores take e4m3, as those of Ada and Hopper do."""
    return is_cuda(facts) and facts.capability >= 89


def reads_cache(facts: Facts) -> bool:
    """Heads in int8 have the sizes that the kernels of CPUs take, so that caches can move."""
    return is_cuda(facts) and (facts.kv_cache_dtype != torch.int8 or facts.head_dim % 16 == 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns 1 for the interpreter, whose tensors are in host memory."""
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 1
    )


def architecture() -> int:
    """Returns the current device's architecture: 80 for sm_80, 90 for sm_90.

    The interpreter counts as sm_90.
    """
    return 90 if triton.knobs.runtime.interpret else driver.active.get_current_target().arch


def dependent() -> dict[str, bool]:
    """Options of a launch of a kernel with a parameter DEPENDENT, which lets the kernel behind it
    begin before it has ended, and waits itself before it reads what kernels in front of it have
    written (programmatic dependent launch, of sm_90 and later).
    """
    return _dependent(0 if triton.knobs.runtime.interpret else driver.active.get_current_device())


@functools.cache
def _dependent(device: int) -> dict[str, bool]:
    if triton.knobs.runtime.interpret or architecture() < 90:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}
