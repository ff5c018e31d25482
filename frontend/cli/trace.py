"""`quire trace`: the path of a prompt's tokens through the engine, step by step.

Must not know: how steps are recorded or shown, torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...ipc.checks import require
from ...ipc.params import RequestOutputKind, SamplingParams
from ...ipc.trace import MAX_STEPS
from .flags import given
from .parser import Parser
from .session import (
    add_session_flags,
    check_sampling,
    default_sampling,
    open_engine,
    request_flags,
)
from .sources import naming_sources

if TYPE_CHECKING:
    from ..llm_engine import LLMEngine
    from ..trace.trace import Trace

USAGE = "[MODEL | URL] [--prompt TEXT] [--steps N] [--json] [--html FILE] [flags]"
DESCRIPTION = (
    "Completes a prompt and shows what each step did: which requests it took and why, which lines "
    "of code ran, and every kernel with its shape, its time and its share of what this machine "
    "allows."
)
PROMPT = "Once upon a time"
WARM_UP_TOKENS = 8
PIPED_WIDTH = 190  # columns, where the output is no terminal
DEFAULT_STEPS = 2
SERVER_TIMEOUT_S = 30.0
COMMON_SAMPLING = ("temperature",)


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("trace", USAGE, DESCRIPTION, argv)
    add = parser.add
    where = "the model, or the address of a server that runs with --admin [bundled]"
    add("where", "MODEL|URL", where, nargs="?")
    add("--api-key", "KEY", "of the server [$OPENAI_API_KEY]")
    add("--prompt", "TEXT", f'["{PROMPT}"]')
    add(
        "--steps",
        "N",
        f"steps to record, 1 to {MAX_STEPS} [{DEFAULT_STEPS}: the prompt's, and a decode]",
    )
    add.switch("--json", "print everything as one JSON object")
    add("--out", "FILE", "write that object to a file, for --diff")
    add("--html", "FILE", "write a page")
    add("--perfetto", "FILE", "write a file for ui.perfetto.dev, a track per thread")
    what = "compare two files written by --out; nothing is run"
    add("--diff", None, what, nargs=2, metavar=("A", "B"))
    parser.set_defaults(prompt=PROMPT, steps=DEFAULT_STEPS)
    parser.add_flags("sampling", request_flags(), COMMON_SAMPLING)
    add_session_flags(parser)
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    require(1 <= args.steps <= MAX_STEPS, "--steps", f"must be 1 to {MAX_STEPS}, got {args.steps}")
    require(bool(args.prompt), "--prompt", "must not be empty")
    if args.diff:
        return diff(*args.diff)
    if args.where and args.where.startswith(("http://", "https://")):
        check_flags_of_server(args)
        show(ask(args), args)
        return 0
    if args.where:
        require(not hasattr(args, "model"), "--model", "and MODEL are the same; give one of them")
        args.model = args.where
    with naming_sources(args.settings):
        check_sampling(given(args, request_flags()))
    with open_engine(args) as engine:
        trace = record(engine, args)
    show(trace, args)
    return 0


def record(engine: LLMEngine, args: argparse.Namespace) -> Trace:
    """Records the first steps of the prompt. Another prompt is completed before it, because an
    engine's first steps are the first to touch its memory.
    """
    params = {**default_sampling(engine), **given(args, request_flags())}
    run(engine, "warm-up", "a", SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=0.0))
    # with bursts a step has several tokens, and the request must not end before the last step
    params |= {"max_tokens": 16 * args.steps, "output_kind": RequestOutputKind.DELTA}
    with engine.trace(args.steps) as trace:
        run(engine, "0", args.prompt, SamplingParams(**params), num_outputs=args.steps)
    return trace


def check_flags_of_server(args: argparse.Namespace) -> None:
    """Raises InvalidParameterError for a flag that cannot apply: the server has its engine, and its
    own sampling parameters for the prompt. Variables and files are for other commands too.
    """
    for name, setting in args.settings.items():
        is_allowed = name == "model" or not setting.source.startswith("flag ")
        require(is_allowed, setting.source.removeprefix("flag "), "does not apply to a server")


def ask(args: argparse.Namespace) -> Trace:
    """Records a trace of a server's engine while it serves its requests."""
    from ..trace.trace import Trace
    from .top import TIMEOUT_S, Server

    server = Server(args.where, args.api_key or os.environ.get("OPENAI_API_KEY"))
    body = {"steps": args.steps, "prompt": args.prompt, "timeout_s": SERVER_TIMEOUT_S}
    if args.settings.get("model") is not None and args.settings["model"].source.startswith("flag "):
        body["model"] = args.model  # a server with several models needs its name
    answer = server.ask("/v1/engine/trace", body, SERVER_TIMEOUT_S + TIMEOUT_S)
    return Trace.from_json(answer, args.where)


def run(
    engine: LLMEngine,
    request_id: str,
    prompt: str,
    params: SamplingParams,
    num_outputs: int | None = None,
) -> None:
    """Completes a prompt, or its first `num_outputs` steps that return something."""
    engine.add_request(request_id, prompt, params)
    taken = 0
    while engine.has_unfinished_requests() and (num_outputs is None or taken < num_outputs):
        taken += bool(engine.step())
    engine.abort_request(request_id)


def show(trace: Trace, args: argparse.Namespace) -> None:
    if args.out:
        Path(args.out).write_bytes(trace.to_json())
    if args.html:
        trace.to_html(args.html)
    if args.perfetto:
        trace.to_perfetto(args.perfetto)
    if args.json:
        sys.stdout.write(trace.to_json().decode() + "\n")
    elif not (args.out or args.html or args.perfetto):
        print_tree(trace)


def print_tree(trace: Trace) -> None:
    from rich.console import Console

    from ..trace.tree import tree_of

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(width=width, markup=False, highlight=False)
    console.print(tree_of(trace, console.width))


def diff(first: str, second: str) -> int:
    from ..trace.diff import compare
    from ..trace.trace import Trace

    a, b = (Trace.from_json(Path(name).read_bytes(), name) for name in (first, second))
    sys.stdout.write(compare(a, b))
    return 0
