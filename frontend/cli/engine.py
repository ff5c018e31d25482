"""`quire engine`: loads a model once and serves it to every program that attaches at an address.
May know: EngineArgs, how a daemon is started.
Must not know: what the daemon does; this process becomes it."""

from __future__ import annotations

import sys

from ...ipc.process import exec_daemon
from ..engine_args import EngineArgs
from .flags import Parser, engine_flags, given

USAGE = "quire engine --listen ipc://PATH [MODEL] [engine flags]"
DESCRIPTION = "Loads MODEL and serves programs that attach with LLM(engine=...) or --engine at this address, until SIGTERM or Ctrl-C."
COMMON = (
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "enable_prefix_caching",
    "num_threads",
)


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("quire engine", USAGE, DESCRIPTION, show_all="--help-all" in argv)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default="bundled", help="directory of the model, or its name on the hub [the bundled model]"
    )
    parser.add_argument("--listen", metavar="ADDRESS", required=True, help="where programs attach: ipc:// and the path of a socket file")
    # The seed belongs to the programs that attach; the model has no flag of its own here.
    parser.add_flags("engine", [flag for flag in engine_flags() if flag.name not in ("model", "seed")], COMMON)
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    config = EngineArgs(**given(args, engine_flags())).create_engine_config()
    print(f"quire engine: starting {args.model} at {args.listen}", file=sys.stderr)
    exec_daemon(args.listen, config)
