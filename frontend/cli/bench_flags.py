"""What the modes of `quire bench` share: their parser and its flags, and the file of the results.

Must not know: how anything is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, TypeVar

from ..bench.workloads import DATASETS
from .parser import Parser

T = TypeVar("T")
TYPES = {"N": int, "X": float, "S": float}  # placeholder of a value -> its type; else text
NOT_SETTINGS = ("api_key", "settings", "config", "print_config")


class BenchParser(Parser):
    """The parser of one mode, with argparse's errors for values of a wrong type."""

    def __init__(self, mode: str, arguments: str, description: str, argv: list[str]):
        prog = f"quire bench {mode}"
        super().__init__(prog, f"{prog} {arguments}", description, show_all="--help-all" in argv)

    def group(self, title: str) -> Adder:
        return Adder(self.add_argument_group(title), self.show_all)


@dataclasses.dataclass(frozen=True)
class Adder:
    """Adds flags to a group. Rare ones are shown by --help-all only."""

    group: Any
    show_all: bool

    def __call__(
        self,
        option: str,
        placeholder: str | None,
        help: str,
        default: Any = None,
        *,
        rare: bool = False,
        **arguments: Any,
    ) -> None:
        if "action" not in arguments:
            help += f" [{default}]" if default not in (None, []) else ""
            arguments |= {"type": TYPES.get(placeholder or "", str), "metavar": placeholder}
        self.group.add_argument(
            option,
            default=default,
            help=argparse.SUPPRESS if rare and not self.show_all else help.replace("%", "%%"),
            **arguments,
        )

    def switch(self, option: str, help: str, *, rare: bool = False) -> None:
        """A flag without a value."""
        self(option, None, help, False, rare=rare, action="store_true")


def add_workload(parser: BenchParser, *, tokenizer: bool) -> None:
    """The flags of WorkloadOptions. `tokenizer`: one may be chosen for the prompts."""
    add = parser.group("workload")
    names = ", ".join(DATASETS)
    add("--dataset-name", "NAME", f"the workload: {names}", "random", choices=DATASETS)
    add(
        "--dataset-path",
        "FILE",
        "file for sharegpt: ShareGPT's JSON, or JSON lines with a prompt each",
    )
    add("--num-prompts", "N", "number of requests; for multi-turn: of conversations", 200)
    add(
        "--input-len",
        "N",
        "tokens of a prompt (words without --tokenizer); for multi-turn: per turn",
        512,
    )
    add(
        "--output-len",
        "N",
        "maximum tokens of an answer [128; for sharegpt: as many as the file's answer]",
    )
    add("--range-ratio", "X", "lengths are uniform between (1 - X) and (1 + X) times these", 0.0)
    add("--prefix-len", "N", "for prefix: number of shared tokens in a prompt", 256, rare=True)
    add("--num-prefixes", "N", "for prefix: number of different shared prefixes", 1, rare=True)
    add("--num-turns", "N", "for multi-turn: turns per conversation", 3, rare=True)
    if tokenizer:
        add(
            "--tokenizer",
            "NAME",
            "directory or hub name: generates prompts of exact length, and counts tokens if the "
            "server does not",
        )
        add.switch("--token-ids", "send prompts as token ids, not as text", rare=True)


def add_ignore_eos(add: Adder, default: bool) -> None:
    shown = "on" if default else "off"
    add(
        "--ignore-eos",
        None,
        f"ignore end-of-sequence: answers have --output-len tokens [{shown}]",
        default,
        action=argparse.BooleanOptionalAction,
    )


def add_json(add: Adder) -> None:
    add("--json", "FILE", "write settings, machine and results to this file")


def options_of(options: type[T], args: argparse.Namespace, **others: Any) -> T:
    """A dataclass of options from the flags with the names of its fields, and from `others`. A
    field without a flag keeps its default.
    """
    names = [field.name for field in dataclasses.fields(options)]  # type: ignore[arg-type]
    return options(**{name: getattr(args, name) for name in names if hasattr(args, name)}, **others)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """All flags as JSON values, without the key and the record of where settings came from."""
    return {
        name: str(value) if value == float("inf") else value
        for name, value in vars(args).items()
        if name not in NOT_SETTINGS
    }


def write_report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Writes the file of --json, if it is given."""
    if args.json:
        from ..bench.report import write_json

        write_json(args.json, settings_of(args), result)
