"""An engine's process that starts before the command line is read.

Must not know: what is on the command line, but for the flags without which the process is not
needed. It imports little, since a start waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence

from . import platform_tuning
from .process import EarlyEngineProcess

# With one of these, a command may want no engine, another kind (see early_engine), or several.
_NOT_EARLY = {
    "-h",
    "--help",
    "--help-all",
    "--api-server-count",
    "--config",
    "--device",
    "--engine",
    "--logits-processors",
    "--print-config",
}
_VARIABLES = ("QUIRE_CONFIG", "QUIRE_DEVICE", "QUIRE_ENGINE", "QUIRE_LOGITS_PROCESSORS")

_process: EarlyEngineProcess | None = None


def begin_early_process(argv: Sequence[str]) -> None:
    """Starts the process if a command with these arguments is likely to use it. Where the system
    does not allow it, the command says so when it starts its engine.
    """
    global _process
    names = {argument.partition("=")[0].replace("_", "-") for argument in argv}
    is_likely = not names & _NOT_EARLY and not any(map(os.environ.get, _VARIABLES))
    if is_likely and platform_tuning.is_enabled():
        with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: no more threads
            _process = EarlyEngineProcess()


def take_early_process() -> EarlyEngineProcess | None:
    """Returns the process, once; the caller owns it."""
    global _process
    taken, _process = _process, None
    return taken


def end_early_process() -> None:
    """Ends the process if nobody has taken it."""
    if (process := take_early_process()) is not None:
        process.send_signal(signal.SIGKILL)  # it has nothing to save
        process.close(0.0)
