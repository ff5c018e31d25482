"""A logits processor for `quire serve`, with which a request ends or stops the engine.

A request with the seed POISON ends each engine that computes its sixth token. One with the seed
TROUBLE does once what a file in the directory $CHAOS_DIRECTORY is named after: "segfault", "raise",
"spin" (holds the GIL).
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

FLAGS = ("--logits-processors", "quire.tests.chaos.trouble:trouble")
POISON, TROUBLE = 660_001, 660_002
POISON_AFTER = 5  # tokens
KINDS = ("segfault", "raise", "spin")


def trouble(params: Any) -> Any:
    if params.seed not in (POISON, TROUBLE):
        return None
    directory = Path(os.environ["CHAOS_DIRECTORY"])

    def processor(prompt: list[int], output: list[int], logits: Any) -> Any:
        if params.seed == POISON and len(output) >= POISON_AFTER:
            os.kill(os.getpid(), signal.SIGSEGV)
        for kind in KINDS if params.seed == TROUBLE else ():
            if (directory / kind).exists():
                (directory / kind).unlink()
                begin(kind)
        return logits

    return processor


def begin(kind: str) -> None:
    if kind == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "raise":  # any other exception would only end the request
        raise KeyboardInterrupt("trouble")
    if kind == "spin":
        re.match("(a|aa)+$", 100 * "a" + "b")
