"""`quire serve`: the HTTP server over an engine in a child process, in this process, or in a
daemon.

Must not know: routes, requests, torch.
"""

from __future__ import annotations

from .flags import ENGINE, engine_flags, given, server_flags
from .parser import Parser
from .plan import plan_beneath
from .sources import naming_sources

USAGE = "quire serve [MODEL] [server flags] [engine flags]"
DESCRIPTION = (
    "Serves MODEL with OpenAI's API until Ctrl-C or SIGTERM. Default MODEL: the small model "
    "bundled with Quire."
)
COMMON = ("host", "port", "api_key")
COMMON_ENGINE = (
    "served_model_name",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "kv_cache_memory_bytes",
    "engine",
)


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("quire serve", USAGE, DESCRIPTION, show_all="--help-all" in argv)
    parser.add_model()
    parser.add_flags("server", server_flags(), COMMON)
    parser.add_flags("engine", [*engine_flags(without=("model",)), ENGINE], COMMON_ENGINE)
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    from ..engine_args import EngineArgs
    from ..server.config import ServerConfig
    from ..server.serving import serve

    # A daemon has its own settings: the model and everything else not given here come from it.
    arguments = given(args, engine_flags())
    engine_args = EngineArgs(**arguments)
    with naming_sources(args.settings), plan_beneath(engine_args, arguments):
        return serve(
            ServerConfig(**given(args, server_flags())),
            engine_args,
            getattr(args, "engine", ENGINE.default),
        )
