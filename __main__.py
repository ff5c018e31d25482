"""The `quire` command: selects the sub-command and turns every exception into a one-sentence
message and an exit code.

Must not know: what a sub-command does. Its module is imported only when it is selected, so that
--version stays fast.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from importlib import import_module

from . import NO_WINDOWS, __version__

if sys.platform == "win32":  # it has no SIGPIPE, to begin with
    sys.exit(f"quire: {NO_WINDOWS}")

COMMANDS = {
    "serve": "serve a model with OpenAI's API",
    "generate": "complete one or many prompts, streaming to the terminal",
    "chat": "chat with the model",
    "embed": "embed the texts of a file, into .npy, .parquet or JSON lines",
    "batch": "answer the requests of a file, as /v1/batches does, without a server",
    "engine": "load a model once and serve it to other programs through a socket file",
    "bench": "measure a server, or the engine offline",
    "plan": "show whether a model fits: weights, context, concurrent requests",
    "doctor": "check this machine and a model, with advice for each problem",
    "top": "watch the engine of a running server",
    "trace": "show the path of a token: what was scheduled and why, and every kernel",
    "launch": "start a coding agent on a running server",
    "pull": "download a model from the hub",
    "models": "list, show and remove the models in the hub cache; check which models run",
}
# their engine's process starts before anything else
START_AN_ENGINE = {"serve", "generate", "chat"}
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
        "  quire help COMMAND    the common flags; quire COMMAND --help-all: all flags",
        "  quire help --man, --completion SHELL    a manual page; completion of a shell",
        "",
        'Try: quire generate "Once upon a time"',
    ]
)


def fail(error: Exception | str, code: int) -> int:
    """Announces the error as one sentence, followed by its notes (a memory plan, for example)."""
    import logging

    from .ipc.log_format import announce

    message = "\n\n".join([str(error), *getattr(error, "__notes__", ())])
    with contextlib.suppress(OSError):  # stderr may be full or closed; the exit code remains
        announce(logging.getLogger("quire"), "quire", message, logging.ERROR)
    return code


def main(argv: list[str] | None = None) -> int:
    """Runs one command line (default: the arguments of the process).

    Returns 0 for success, 1 for a failure, 2 for bad input, 130 after an interrupt, 141 for a
    broken pipe.
    """
    argv = sys.argv[1:] if argv is None else argv
    open_missing_streams()
    try:
        try:
            return run(argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        # It may leave an object half made, as asyncio's loop, whose finalizer then fails at the end
        # of this clause. Nobody needs its report: the process ends.
        sys.unraisablehook = lambda _: None
        if sys.stderr.isatty():  # the shell's prompt begins its line, where the ^C is
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has exited (`quire generate ... | head`)
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk behind `>`, a limit of the system
        _discard_output()
        if error.errno == errno.EBADF and not error.filename:
            return fail("standard output is closed", EXIT_FAILURE)
        where = f"{error.filename}: " if error.filename else ""
        return fail(f"{where}{error.strerror or error}", EXIT_FAILURE)


def _discard_output() -> None:
    """Discards buffered output, so that the interpreter's final flush prints no error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_missing_streams() -> None:
    """Opens the null device for each standard stream that was closed when the program started
    (cron, `>&-`), so that no file of the program takes its number. Python sets such a stream to
    None. Writing to standard output stays an error, as it is for every file that is closed.
    """
    for name, mode, flags in (
        ("stdin", "r", os.O_RDONLY),
        ("stdout", "w", os.O_RDONLY),
        ("stderr", "w", os.O_WRONLY),
    ):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, flags)
            os.set_inheritable(number, True)  # an engine that is started needs it for the same
            setattr(sys, name, open(number, mode))


def run(argv: list[str]) -> int:
    command = argv[0] if argv else ""
    if command in ("--version", "-V") or (command in COMMANDS and argv[1:] == ["--version"]):
        print(f"quire {__version__}")
        return 0
    if command == "help" and argv[1:] and argv[1].startswith("-"):
        return run_command("help", argv[1:])
    if command == "help" and argv[1:]:
        return run([*argv[1:], "--help"])
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
        try:
            if command in START_AN_ENGINE:
                from .ipc.early_process import begin_early_process

                begin_early_process(argv)
            return import_module(f".frontend.cli.{command}", __package__).main(argv)
        finally:
            if command in START_AN_ENGINE:
                from .ipc.early_process import end_early_process

                end_early_process()
    except (InvalidParameterError, ModelLoadError) as error:
        return fail(error, EXIT_USAGE)
    except QuireError as error:
        return fail(error, EXIT_FAILURE)
    except (OSError, KeyboardInterrupt):
        raise
    except Exception as error:
        # A bug in Quire: the cause in one line. QUIRE_TRACEBACK=1 prints the traceback.
        if os.environ.get("QUIRE_TRACEBACK"):
            raise
        return fail(
            f"internal error: {type(error).__name__}: {error} (QUIRE_TRACEBACK=1 shows where)",
            EXIT_FAILURE,
        )


def unknown_command(command: str) -> str:
    from .frontend.arguments.other_engines import COMMANDS as OTHERS
    from .ipc.checks import closest

    if command in OTHERS:
        return f"unknown command {command!r}; use {OTHERS[command]}"
    near = closest(command, COMMANDS)
    return f"unknown command {command!r}; " + (
        f"did you mean {near!r}?" if near else f"the commands are {', '.join(COMMANDS)}"
    )


if __name__ == "__main__":
    sys.exit(main())
