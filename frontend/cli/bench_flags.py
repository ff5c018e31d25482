"""The flags that the modes of `quire bench` share.

Must not know: how anything is measured.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..bench.workloads import DATASETS, WorkloadOptions
from .parser import Parser


class Adder:
    """Adds arguments to a group. Rare ones are shown by --help-all only."""

    def __init__(self, parser: Parser, title: str):
        self.group, self.show_all = parser.add_argument_group(title), parser.show_all

    def __call__(self, option: str, help: str, *, rare: bool = False, **arguments: Any) -> None:
        default = arguments.get("default")
        shown = help if default in (None, []) or "action" in arguments else f"{help} [{default}]"
        self.group.add_argument(
            option,
            help=argparse.SUPPRESS if rare and not self.show_all else shown.replace("%", "%%"),
            **arguments,
        )


def add_workload(parser: Parser, *, num_prompts: int, tokenizer: bool) -> None:
    add = Adder(parser, "workload")
    add(
        "--dataset-name",
        f"the workload: {', '.join(DATASETS)}",
        choices=DATASETS,
        default="random",
        metavar="NAME",
    )
    add(
        "--dataset-path",
        "file for sharegpt: ShareGPT's JSON, or JSON lines with a prompt each",
        metavar="FILE",
    )
    add(
        "--num-prompts",
        "number of requests; for multi-turn: of conversations",
        type=int,
        default=num_prompts,
        metavar="N",
    )
    add(
        "--input-len",
        "tokens of a prompt (words without --tokenizer); for multi-turn: per turn",
        type=int,
        default=512,
        metavar="N",
    )
    add(
        "--output-len",
        "maximum tokens of an answer [128; for sharegpt: as many as the file's answer]",
        type=int,
        metavar="N",
    )
    add(
        "--range-ratio",
        "lengths are uniform between (1 - X) and (1 + X) times these",
        type=float,
        default=0.0,
        metavar="X",
    )
    add(
        "--prefix-len",
        "for prefix: number of shared tokens in a prompt",
        rare=True,
        type=int,
        default=256,
        metavar="N",
    )
    add(
        "--num-prefixes",
        "for prefix: number of different shared prefixes",
        rare=True,
        type=int,
        default=1,
        metavar="N",
    )
    add(
        "--num-turns",
        "for multi-turn: turns per conversation",
        rare=True,
        type=int,
        default=3,
        metavar="N",
    )
    if tokenizer:
        add(
            "--tokenizer",
            "directory or hub name: generates prompts of exact length, and counts tokens if the "
            "server does not",
            metavar="NAME",
        )
        add("--token-ids", "send prompts as token ids, not as text", rare=True, action="store_true")


def add_sampling(add: Adder, *, ignore_eos: bool) -> None:
    add(
        "--ignore-eos",
        "ignore end-of-sequence: answers have --output-len tokens "
        f"[{'on' if ignore_eos else 'off'}]",
        action=argparse.BooleanOptionalAction,
        default=ignore_eos,
    )
    add("--json", "write settings, machine and results to this file", metavar="FILE")


def workload_options(args: argparse.Namespace, seed: int) -> WorkloadOptions:
    names = (
        "dataset_name",
        "dataset_path",
        "num_prompts",
        "input_len",
        "output_len",
        "range_ratio",
        "prefix_len",
        "num_prefixes",
        "num_turns",
    )
    return WorkloadOptions(
        **{name: getattr(args, name) for name in names},
        token_ids=getattr(args, "token_ids", False),
        seed=seed,
    )


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """All flags as JSON values, without the key and the record of where settings came from."""
    values = {
        name: value
        for name, value in vars(args).items()
        if name not in ("api_key", "settings", "config", "print_config")
    }
    return {name: str(value) if value == float("inf") else value for name, value in values.items()}
