"""`quire models`: the content of the hub cache on this machine, sizes, and missing files.

Must not know: how the cache is laid out, the network, torch.
"""

from __future__ import annotations

import sys

import msgspec

from .parser import Parser
from .table import print_table
from .values import format_bytes, format_count

USAGE = "quire models [--json]"
DESCRIPTION = (
    "Lists the models on this machine: the bundled one and those in the hub cache (HF_HOME). "
    "Does not use the network."
)


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("quire models", USAGE, DESCRIPTION, show_all="--help-all" in argv)
    parser.add_argument("--json", action="store_true", help="one JSON object per model and line")
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    from ..model_info.model_cache import list_models

    models, warnings = list_models()
    if args.json:
        for model in models:
            print(msgspec.json.encode(model).decode())
    else:
        header = ("model", "revision", "size", "dtype", "parameters", "architecture", "state")
        rows = [
            (
                model.model,
                model.revision,
                format_bytes(model.size_bytes),
                model.dtype or "?",
                format_count(model.num_parameters) if model.num_parameters else "?",
                model.architecture or "?",
                "; ".join(model.problems) or "ready",
            )
            for model in models
        ]
        print_table(header, rows, right=frozenset({"size", "parameters"}))
    for warning in warnings:
        print(f"quire: {warning}", file=sys.stderr)
    return 0
