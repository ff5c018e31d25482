"""`quire bench serve|throughput|latency|embed|cpu`: selects the mode.

Must not know: how anything is measured. bench_serve.py, bench_offline.py and bench_cpu.py are
imported only when selected.
"""

from __future__ import annotations

import sys
from importlib import import_module

MODES = {
    "serve": "load a running server of the OpenAI API, Quire or another",
    "throughput": "the offline engine, all requests at once",
    "latency": "the offline engine, one batch repeatedly",
    "embed": "the offline engine, embeddings of texts in batches",
    "cpu": "a model's steps compared with this CPU's memory and arithmetic limits",
}
HELP = "\n".join(
    [
        "usage: quire bench MODE ...",
        "",
        *(f"  quire bench {mode:<10}  {what}" for mode, what in MODES.items()),
    ]
)
# bench_offline has the other modes
MODULES = {"serve": "bench_serve", "cpu": "bench_cpu"}


def main(argv: list[str]) -> int:
    mode = argv[0] if argv else ""
    if mode in ("--help", "-h", "--help-all"):
        print(HELP)
        return 0
    if mode not in MODES:
        known = ", ".join(MODES)
        unknown = f"quire bench: unknown mode {mode!r}; the modes are {known}"
        print(unknown if mode else HELP, file=sys.stderr)
        return 2
    module = import_module(f".{MODULES.get(mode, 'bench_offline')}", __package__)
    return getattr(module, mode)(argv[1:])
