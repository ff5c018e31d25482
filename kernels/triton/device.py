"""Where the Triton implementations run, and what their launches need to know of the device.
May know: the facts that a predicate is given, Triton's driver.
Must not know: any operation."""

from ..registry import Facts

PRIORITY = 20


def is_cuda(facts: Facts) -> bool:
    return facts.device == "cuda"
