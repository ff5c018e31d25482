"""An engine's process that starts before the command line is read.

Must not know: what is on the command line, but for the flags without which the process is not
needed. It imports little, since a start waits for it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence

from . import platform_tuning
from .process import EarlyEngineProcess

# with one of these, a command wants help, or an engine of another kind (see early_engine)
_OTHERS = {"-h", "--help", "--help-all", "--device", "--engine", "--logits-processors"}

_process: EarlyEngineProcess | None = None


def begin_early_process(argv: Sequence[str]) -> None:
    """Starts the process if a command with these arguments is likely to use it. Where the system
    does not allow it, the command says so when it starts its engine.
    """
    global _process
    names = {argument.partition("=")[0].replace("_", "-") for argument in argv}
    if platform_tuning.is_enabled() and not names & _OTHERS:
        with contextlib.suppress(OSError):
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
