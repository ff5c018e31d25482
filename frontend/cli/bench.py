"""`quire bench serve|throughput|latency|cpu`: selects the mode.

Must not know: how anything is measured. bench_serve.py, bench_offline.py and bench_cpu.py are
imported only when selected.
"""

from __future__ import annotations

import sys

MODES = {
    "serve": "load a running server of the OpenAI API, Quire or another",
    "throughput": "the offline engine, all requests at once",
    "latency": "the offline engine, one batch repeatedly",
    "cpu": "a model's steps compared with this CPU's memory and arithmetic limits",
}
HELP = "\n".join(
    [
        "usage: quire bench MODE ...",
        "",
        *(f"  quire bench {mode:<10} {what}" for mode, what in MODES.items()),
    ]
)


def main(argv: list[str]) -> int:
    mode = argv[0] if argv else ""
    if mode in ("--help", "-h", "--help-all"):
        print(HELP)
        return 0
    if mode not in MODES:
        print(
            HELP
            if not mode
            else f"quire bench: unknown mode {mode!r}; the modes are {', '.join(MODES)}",
            file=sys.stderr,
        )
        return 2
    if mode == "serve":
        from .bench_serve import serve

        return serve(argv[1:])
    if mode == "cpu":
        from .bench_cpu import cpu

        return cpu(argv[1:])
    from .bench_offline import latency, throughput

    return (latency if mode == "latency" else throughput)(argv[1:])
