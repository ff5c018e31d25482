"""`--man` and `quire help --completion SHELL`: the manual page and the completion of a shell, made
from the parsers that also make --help.

Must not know: what a flag does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import import_module

from ... import __version__
from ...__main__ import COMMANDS
from ...ipc.errors import InvalidParameterError
from .parser import Parser

USAGE = "[COMMAND ...] | --man | --completion SHELL"
DESCRIPTION = "Shows the help of a command, the manual page, or the completion of a shell."
SHELLS = ("bash", "zsh", "tcsh")


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("help", USAGE, DESCRIPTION, argv)
    parser.add.switch("--man", "print the manual page, for man -l")
    completion_of = "print what completes commands and flags in a shell"
    parser.add("--completion", None, completion_of, choices=SHELLS)
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    if args.man:
        sys.stdout.write("".join(manual_page()))
    elif args.completion:
        sys.stdout.write(completion(args.completion))
    return 0


def parsers() -> Iterator[tuple[str, Parser]]:
    """Yields the parser of each command and of each mode of a benchmark, with all flags."""
    from .bench import MODES, MODULES

    makers = {name: (name, "make_parser") for name in COMMANDS if name != "bench"} | {
        f"bench {mode}": (MODULES.get(mode, "bench_offline"), f"{mode}_parser") for mode in MODES
    }
    for name, (module, maker) in makers.items():
        parser = getattr(import_module(f".{module}", __package__), maker)(["--help-all"])
        if parser.groups:
            parser.add_sources()
        yield name, parser


# ---------------------------------------------------------------- the manual page


def manual_page() -> Iterator[str]:
    """Yields the manual page in roff, with the macros of man(7)."""
    # lines with one long word cannot be adjusted on both sides
    yield f'.TH QUIRE 1 "" "quire {__version__}" "Quire"\n.ad l\n'
    yield ".SH NAME\nquire \\- an inference engine for large language models\n"
    yield ".SH SYNOPSIS\n.B quire\n.I COMMAND\n[...]\n.SH COMMANDS\n"
    for name, what in COMMANDS.items():
        yield f".TP\n.B quire {name}\n{escaped(what)}\n"
    for name, parser in parsers():
        yield f".SH QUIRE {name.upper()}\n.B {escaped(parser.usage or '')}\n.PP\n"
        yield f"{escaped(parser.description or '')}\n"
        yield from _flags(parser)
    yield ".SH EXIT STATUS\n"
    for code, meaning in (
        (0, "success"),
        (1, "failure; standard error has the cause"),
        (2, "bad input; one sentence on standard error"),
        (130, "interrupted by Ctrl-C"),
        (141, "the reader of standard output left"),
    ):
        yield f".TP\n.B {code}\n{meaning}\n"


def _flags(parser: Parser) -> Iterator[str]:
    formatter = parser._get_formatter()  # as --help writes "--max-num-seqs N"
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help not in (None, argparse.SUPPRESS)]
        if actions:
            yield f".SS {escaped(group.title or '')}\n"
        for action in actions:
            yield f".TP\n.B {escaped(formatter._format_action_invocation(action))}\n"
            yield f"{escaped(formatter._expand_help(action))}\n"


def escaped(text: str) -> str:
    """Returns plain text as one line of roff."""
    text = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


# ---------------------------------------------------------------- completion


def completion(shell: str) -> str:
    """Returns the script of a shell. Raises InvalidParameterError if shtab is not installed."""
    try:
        import shtab  # type: ignore[import-not-found]
    except ImportError:
        raise InvalidParameterError("--completion", "needs shtab: pip install shtab") from None
    from .bench import MODES

    root = argparse.ArgumentParser("quire")
    root.add_argument("--version", action="version", version=__version__)
    modes = commands = root.add_subparsers()
    for name, parser in parsers():
        if name.startswith("bench ") and modes is commands:
            modes = commands.add_parser("bench", help=COMMANDS["bench"]).add_subparsers()
        target, _, mode = name.rpartition(" ")
        (modes if target else commands).add_parser(
            mode, help=(MODES if target else COMMANDS)[mode], parents=[parser], add_help=False
        )
    return shtab.complete(root, shell=shell)
