"""Tests that cannot pass with pytest's option --device cuda, each with its reason. All others must.

The first entry whose pattern is found in a test's id (path::name[parameters]) counts. A visit to a
GPU prints the reasons with `pytest -rs`; whatever fails there belongs in the code or in this table.
"""

from __future__ import annotations

import re

CPU_KERNELS = "is about kernels of CPUs, their programs or the memory of the host"
CPU_BITS = "promises bits that only kernels of CPUs have"
MEMORY = "counts pages of the host's memory, where a GPU's weights and cache are not"
SEVERAL = "needs several GPUs"

# pattern -> reason
REASONS = {
    r"^tests/kernels/(native|cpu)/|^tests/executor/program/": CPU_KERNELS,
    r"^tests/executor/(weights/test_(packed|early|load_times)|models/test_packed)": CPU_KERNELS,
    r"^tests/executor/runner/test_bursts|test_narrowed|native_call": CPU_KERNELS,
    r"^tests/executor/(ranks|groups)/|^tests/test_(ranks|expert_parallel|replicas)": SEVERAL,
    r"^tests/test_(\w+_)?equalities|[_-]bits?\b|_bit_|changes_no_bit": CPU_BITS,
    r"blocks_are_kept_and_planned": CPU_BITS,
    r"reference_and_native": CPU_KERNELS,
    r"_resident_|_pages_|huge_pages": MEMORY,
}


# Tests that compare the bits of a request beside others, or in other chunks, with those that it
# has alone. A GPU has such bits with the kernels of batch_invariant.
INVARIANT = (
    r"^tests/test_(kv_offload|speculation|hybrid_models)\.py",
    r"^tests/executor/models/test_(draft|mtp)_heads\.py",
    r"::test_(exact_whole|bits_|same_bits|windows_experts)",
)


def needs_invariance(test_id: str) -> bool:
    """Whether the engines of this test get the kernels of batch_invariant on a GPU."""
    return any(re.search(pattern, test_id) for pattern in INVARIANT)


def reason_for(test_id: str) -> str | None:
    """Why this test cannot pass on a GPU; None: it must."""
    for pattern, reason in REASONS.items():
        if re.search(pattern, test_id):
            return reason
    return None
