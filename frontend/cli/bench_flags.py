"""The flags and the file of results that the modes of `quire bench` share.

Must not know: how anything is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, TypeVar

from ..bench.options import WorkloadOptions
from .parser import Adder, Parser

T = TypeVar("T")
NOT_SETTINGS = ("api_key", "settings", "config", "print_config")


def add_workload(parser: Parser, *, tokenizer: bool) -> None:
    """Adds the flags of WorkloadOptions. `tokenizer`: whether one may be chosen for the prompts."""
    add = parser.group("workload")
    add.fields(WorkloadOptions)
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
    what = f"ignore end-of-sequence: answers have --output-len tokens [{shown}]"
    add.on_off("--ignore-eos", what, default)


def add_json(add: Adder) -> None:
    add("--json", "FILE", "write settings, machine and results to this file")


def options_of(options: type[T], args: argparse.Namespace, **others: Any) -> T:
    """Makes a dataclass of options from the flags that have the names of its fields, and from
    `others`. A field without a flag keeps its default.
    """
    names = [field.name for field in dataclasses.fields(options)]  # type: ignore[arg-type]
    return options(**{name: getattr(args, name) for name in names if hasattr(args, name)}, **others)


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Returns all flags as JSON values, without the key and the record of their sources."""
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
