"""`quire models`: the models on this machine, whether they run here, what they need; removing them;
which models of a catalogue run.

Must not know: how the cache is laid out, the network, torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...ipc.errors import InvalidParameterError, ModelLoadError
from ..arguments.quantities import format_bytes, format_count
from .parser import Parser
from .table import print_table

if TYPE_CHECKING:
    from ..model_info.model_cache import CachedModel

USAGE = (
    "[--json] | show NAME [--json] | remove NAME [--yes] | "
    "check NAME ... [--catalogue FILE] [--download] [--json]"
)
DESCRIPTION = (
    "Lists the models on this machine: the bundled one and those in the hub cache (HF_HOME), and "
    "whether they fit the memory that is free. show: one model and its memory plan. remove: "
    "deletes one from the cache; org/name: all its files, org/name:Q4_K_M: those of one "
    "quantization. check: says of any models, from their configurations alone, whether they run "
    "natively, in transformers' code, or not, and why. Only --download uses the network."
)


ACTIONS = ("list", "show", "remove", "check")


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("models", USAGE, DESCRIPTION, argv)
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="list")
    parser.add(
        "names",
        "NAME",
        "a model, as listed; to check: also a config.json, a directory, a GGUF file",
        nargs="*",
    )
    parser.add("--catalogue", "FILE", "check the models of a file, one name per line; -: stdin")
    parser.add.switch("--download", "check: fetch configurations that are not in the hub cache")
    parser.add.switch("--json", "one JSON object per model and line")
    parser.add.switch("--yes", "remove without asking")
    return parser


def main(argv: list[str]) -> int:
    parser = make_parser(argv)
    args = parser.parse(argv)
    names, has_catalogue = args.names, args.catalogue is not None
    action = "check" if has_catalogue and args.action == "list" else args.action
    if action == "check":
        is_complete = bool(names) or has_catalogue
    else:
        is_complete = len(names) == (action != "list") and not (has_catalogue or args.download)
    if not is_complete:
        parser.error(f"usage: {parser.usage}")
    if action == "check":
        return check(names, args.catalogue, downloads=args.download, as_json=args.json)
    if action == "show":
        return show(names[0], as_json=args.json)
    if action == "remove":
        return remove(names[0], is_agreed=args.yes)
    return list_all(as_json=args.json)


def list_all(*, as_json: bool) -> int:
    from ..model_info.model_cache import list_models

    models, warnings = list_models()
    if as_json:
        for model in models:
            print(msgspec.json.encode(model).decode())
    else:
        header = (
            *("model", "revision", "size", "weights", "parameters", "architecture", "needs"),
            "state",
        )
        rows = [
            (
                model.model,
                model.revision,
                format_bytes(model.size_bytes),
                model.weights or "?",
                format_count(model.num_parameters) if model.num_parameters else "?",
                model.architecture or "?",
                format_bytes(model.needs_bytes) if model.needs_bytes else "?",
                state_of(model),
            )
            for model in models
        ]
        print_table(header, rows, right=frozenset({"size", "parameters", "needs"}))
    for warning in warnings:
        print(f"quire: {warning}", file=sys.stderr)
    return 0


def state_of(model: CachedModel) -> str:
    if model.problems:
        return "; ".join(model.problems)
    if model.fits is False:
        return "too large for the memory that is free"
    return f"ready with {' '.join(model.flags)}" if model.flags else "ready"


def show(name: str, *, as_json: bool) -> int:
    from ..engine_args import EngineArgs
    from ..model_info.model_cache import list_models
    from ..model_info.plan import make_plan
    from .plan import render

    models, _ = list_models()
    found = [model for model in models if model.model.lower() == name.lower()]
    if not found:
        near = [model.model for model in models if model.model.lower().startswith(name.lower())]
        hint = f"; there are: {', '.join(near)}" if near else "; `quire models` lists what is"
        raise ModelLoadError(f"model {name!r} is not on this machine{hint}")
    for model in found:
        plan = None if model.problems else make_plan(EngineArgs(model.directory))
        if plan is not None:
            plan = msgspec.structs.replace(plan, model=model.model)
        if as_json:
            shown = msgspec.structs.asdict(model) | {"plan": plan}
            print(msgspec.json.encode(shown).decode())
            continue
        revision = f", revision {model.revision}" * bool(model.revision)
        print(f"{model.model}{revision}: {format_bytes(model.size_bytes)} in {model.directory}")
        if model.weights is not None:
            print(f"weights: {model.weights}")
        print(f"state: {state_of(model)}")
        if plan is not None:
            print(f"\n{render(plan)}", end="")
    return 0


def check(names: Sequence[str], catalogue: str | None, *, downloads: bool, as_json: bool) -> int:
    from ..model_info.catalogue import NOT_HERE, RUNS, judge, read_catalogue

    if catalogue is not None:
        text = sys.stdin.read() if catalogue == "-" else _text_of(catalogue)
        names = [*names, *read_catalogue(text)]
    verdicts = judge(names, downloads=downloads)
    if as_json:
        for verdict in verdicts:
            print(msgspec.json.encode(verdict).decode())
        return 0
    header = ("model", "runs", "architecture", "reason")
    rows = [(v.model, v.runs, v.architecture or v.model_type or "?", v.reason) for v in verdicts]
    print_table(header, rows)
    counts = [(sum(v.runs == runs for v in verdicts), runs) for runs in RUNS]
    print(f"{len(verdicts)} models: {', '.join(f'{count} {runs}' for count, runs in counts)}")
    if not downloads and any(verdict.reason == NOT_HERE for verdict in verdicts):
        print("quire: --download fetches configurations that are not here", file=sys.stderr)
    return 0


def _text_of(catalogue: str) -> str:
    try:
        return Path(catalogue).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidParameterError("--catalogue", f"{catalogue}: {reason}") from None


def remove(name: str, *, is_agreed: bool) -> int:
    from ..model_info.model_removal import find_removal

    removal = find_removal(name)
    size = format_bytes(removal.num_bytes)
    if not is_agreed:
        if not sys.stdin.isatty():
            raise InvalidParameterError("--yes", "is needed where there is no terminal to ask on")
        for path in removal.paths:
            print(path)
        if input(f"Remove {name}, {size}? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 1
    removal.run()
    print(f"removed {name}: {size}")
    return 0
