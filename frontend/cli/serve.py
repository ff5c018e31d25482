"""`quire serve`: the HTTP server over an engine in a child process, in this one, or in a daemon.
May know: the flags of server and engine, frontend/server/serving.py.
Must not know: routes, requests, torch."""

from __future__ import annotations

from ..engine_args import EngineArgs
from ..server.config import ServerConfig, server_fields
from .flags import Flag, Parser, _default, _description, engine_flags, given
from .session import add_engine_flag

USAGE = "quire serve [MODEL] [server flags] [engine flags]"
DESCRIPTION = "Serves MODEL over OpenAI's API, until Ctrl-C or SIGTERM. Without MODEL: the small one that comes with Quire."
COMMON = ("host", "port", "api_key", "page", "tool_call_parser")
COMMON_ENGINE = ("dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "served_model_name", "num_threads")


def server_flags() -> list[Flag]:
    return [Flag(name, field.type, _default(field), _description(field.type)) for name, field in server_fields().items()]


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("quire serve", USAGE, DESCRIPTION, show_all="--help-all" in argv)
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default="bundled", help="directory of the model, or its name on the hub [the bundled model]"
    )
    parser.add_flags("server", server_flags(), COMMON)
    parser.add_flags("engine", [flag for flag in engine_flags() if flag.name != "model"], COMMON_ENGINE)
    add_engine_flag(parser)
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    config = ServerConfig(**given(args, server_flags()))
    engine_args = given(args, engine_flags())
    if args.engine.startswith("ipc://") and args.model == "bundled":
        engine_args.pop("model", None)  # the daemon says what it serves
    from ..server.serving import serve

    return serve(config, EngineArgs(**engine_args), args.engine)
