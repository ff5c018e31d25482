"""Says where the CPU implementations run.

Must not know: any operation.
"""

from ..registry import Facts

PRIORITY = 10


def is_cpu(facts: Facts) -> bool:
    return facts.device == "cpu"


def has_plain_cache(facts: Facts) -> bool:
    return is_cpu(facts) and not facts.converts_kv
