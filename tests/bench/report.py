"""Where the benchmarks write their numbers: results/HARDWARE__MODEL__WORKLOAD.json, one object per
run, newest last.
"""

from __future__ import annotations

import json
import os
import platform
import re
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quire import __version__
from quire.frontend.bench.machine import processor_name, processor_text

RESULTS = Path(__file__).resolve().parent / "results"


def hardware() -> str:
    """The processor's name, its matrix instructions beyond AVX2, and the cores that this process
    may use, e.g. "intel-r-xeon-r-platinum-8488c-amx-2-cores". Machines with the same processor name
    can differ by a factor of two.
    """
    name = re.sub(r"[^a-z0-9]+", "-", processor_name().lower()).strip("-")
    text = processor_text()
    isa = "-amx" if "amx_bf16" in text else "-avx512" if "avx512_bf16" in text else ""
    return f"{name}{isa}-{len(os.sched_getaffinity(0))}-cores"


def write_result(model: str, workload: str, numbers: dict[str, Any]) -> Path:
    """Appends one run, with the time and the relevant versions."""
    path = RESULTS / f"{hardware()}__{model}__{workload}.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    stamp = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
    }
    runs.append({**stamp, "quire": __version__, "torch": version("torch"), **numbers})
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(runs, indent=1) + "\n")
    return path
