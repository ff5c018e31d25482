"""Describes the machine of a result: its name, cores, memory and memory bandwidth.

Must not know: what is measured on it.
"""

from __future__ import annotations

import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any

from ... import __version__
from ...ipc.operating_system import SYSTEM


def processor_text() -> str:
    """Returns the system's description of its processors, or "" if there is none."""
    return SYSTEM.processor_text()


def processor_name() -> str:
    name = re.search(r"^model name\s*:\s*(.+)$", processor_text(), re.MULTILINE)
    return name[1] if name else platform.processor() or platform.machine()


def describe_machine() -> dict[str, Any]:
    """Returns plain values for result files, without names of people, hosts or paths."""
    import psutil

    return {
        "processor": processor_name(),
        "num_cores": SYSTEM.num_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": list(os.getloadavg()),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "quire": __version__,
    }


def measure_read_bandwidth(num_bytes: int, num_threads: int, seconds: float = 0.5) -> float:
    """Returns the best rate in bytes per second at which threads read an array of num_bytes within
    `seconds`.

    An array that fits the caches is read from them, as weights would be.
    """
    import numpy

    parts = numpy.array_split(
        numpy.ones(max(num_bytes // 8, num_threads), dtype=numpy.int64), num_threads
    )
    best = float("inf")
    with ThreadPoolExecutor(num_threads) as threads:
        end = perf_counter() + seconds
        while perf_counter() < end or best == float("inf"):
            start = perf_counter()
            # max is limited by memory bandwidth and releases the GIL
            list(threads.map(numpy.ndarray.max, parts))
            best = min(best, perf_counter() - start)
    return sum(part.nbytes for part in parts) / best
