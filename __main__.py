"""The `quire` command: chooses the sub-command and turns every exception into one sentence and an
exit code.

Must not know: what a sub-command does; its module is imported only when it is the one asked for, so
that --version costs nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from importlib import import_module

from . import __version__

COMMANDS = {
    "serve": "serve a model over OpenAI's API",
    "generate": "complete one or many prompts, streaming to the terminal",
    "chat": "talk with the model",
    "engine": "load a model once and serve it to other programs through a socket file",
    "bench": "measure a server, or the engine offline",
    "plan": "what a model needs and what this machine gives: weights, context, requests at once",
    "doctor": "what this machine and a model lack, and what to do about it",
    "top": "watch the engine of a running server",
    "models": "what is in the hub's cache on this machine, and what it lacks",
}
EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = (
    1,
    2,
    128 + signal.SIGINT,
    128 + signal.SIGPIPE,
)

HELP = "\n".join(
    [
        "usage: quire COMMAND ...",
        "",
        "Quire, an LLM inference engine.",
        "",
        *(f"  quire {name:<10} {what}" for name, what in COMMANDS.items()),
        "",
        "  quire --version    print the version",
        "  quire COMMAND --help, --help-all    the most used flags; all of them",
        "",
        'Try: quire generate "Once upon a time"',
    ]
)


def fail(error: Exception | str, code: int) -> int:
    """The error as one sentence, and beneath it the notes that somebody added (a plan, where memory
    does not suffice).
    """
    with contextlib.suppress(OSError):  # standard error may be full or closed; the code remains
        print("\n\n".join([f"quire: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
    return code


def main(argv: list[str] | None = None) -> int:
    """Runs one command line (default: the process's own).

    Returns 0, or 1 failure, 2 bad input, 130 interrupted, 141 broken pipe.
    """
    argv = sys.argv[1:] if argv is None else argv
    open_missing_streams()
    try:
        try:
            return run(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader left (`quire generate ... | head`)
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk behind `>`, a limit of the system
        _discard_output()
        where = f"{error.filename}: " if error.filename else ""
        return fail(f"{where}{error.strerror or error}", EXIT_FAILURE)


def _discard_output() -> None:
    """What is still buffered goes nowhere, so that the interpreter's last flush is quiet."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_missing_streams() -> None:
    """A program started with a standard stream closed (cron, `>&-`) has None in its place; here all
    three can be used.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def run(argv: list[str]) -> int:
    command = argv[0] if argv else ""
    if command in ("--version", "-V") or (command in COMMANDS and argv[1:] == ["--version"]):
        print(f"quire {__version__}")
        return 0
    if command in ("--help", "-h", "--help-all", "help"):
        print(HELP)
        return 0
    if not command:
        print(HELP, file=sys.stderr)
        return EXIT_USAGE
    if command not in COMMANDS:
        return fail(unknown_command(command), EXIT_USAGE)
    return run_command(command, argv[1:])


def run_command(command: str, argv: list[str]) -> int:
    from .ipc.errors import InvalidParameterError, ModelLoadError, QuireError

    try:
        return import_module(f".frontend.cli.{command}", __package__).main(argv)
    except (InvalidParameterError, ModelLoadError) as error:
        return fail(error, EXIT_USAGE)
    except QuireError as error:
        return fail(error, EXIT_FAILURE)
    except (OSError, KeyboardInterrupt):
        raise
    except Exception as error:
        # a defect of ours: the cause in one line, the rest for whoever sets QUIRE_TRACEBACK=1
        if os.environ.get("QUIRE_TRACEBACK"):
            raise
        return fail(
            f"internal error: {type(error).__name__}: {error} (QUIRE_TRACEBACK=1 shows where)",
            EXIT_FAILURE,
        )


def unknown_command(command: str) -> str:
    from .ipc.checks import closest

    near = closest(command, COMMANDS)
    return f"unknown command {command!r}; " + (
        f"did you mean {near!r}?" if near else f"the commands are {', '.join(COMMANDS)}"
    )


if __name__ == "__main__":
    sys.exit(main())
