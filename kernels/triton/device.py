"""Where the Triton implementations run, and what their launches need to know of the device.
May know: the facts that a predicate is given, Triton's driver.
Must not know: any operation."""

from ..registry import Facts

PRIORITY = 20

# Elements that a program of 4 warps moves at once: 8 to each thread, in bf16 one load of 16 bytes. 16 such programs fill an SM's 2048
# threads with 32 KiB in flight; 132 SMs then have twice what an H200's 4.8 TB/s at some 600 ns of latency need.
TILE = 1024


def is_cuda(facts: Facts) -> bool:
    return facts.device == "cuda"
