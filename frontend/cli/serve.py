"""`quire serve`: the HTTP server over an engine in a child process, in this process, or in a
daemon; or over several models, each with an engine of its own.

Must not know: routes, requests, torch.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...ipc import platform_tuning
from ...ipc.errors import InvalidParameterError
from ...ipc.log_format import configure_logging, log_level_of
from .flags import ENGINE, Flag, engine_flags, given, server_flags
from .parser import Parser
from .plan import plan_beneath
from .sources import naming_sources, read_sections

if TYPE_CHECKING:
    from ..server.served_models import ServedModel

USAGE = "[MODEL | NAME=MODEL] ... [server flags] [engine flags]"
DESCRIPTION = (
    "Serves MODEL with OpenAI's API until Ctrl-C or SIGTERM. Default MODEL: the small model "
    "bundled with Quire. Several models are loaded when requests name them, as memory allows; "
    "NAME=MODEL gives one another name."
)
COMMON = ("host", "port", "api_key")
COMMON_ENGINE = (
    "served_model_name",
    "dtype",
    "quantization",
    "num_threads",
    "max_model_len",
    "max_num_seqs",
    "kv_cache_memory_bytes",
    "engine",
)
# Only a server with several models has these settings, and one of them makes it such a server.
OF_SEVERAL = ("default_model", "model_options", "memory_limit", "keep_alive", "sleep_after")


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("serve", USAGE, DESCRIPTION, argv)
    parser.add_model(several=True)
    parser.add_flags("server", server_flags(), COMMON)
    parser.add_flags("engine", [*engine_flags(without=("model",)), ENGINE], COMMON_ENGINE)
    return parser


def main(argv: list[str]) -> int:
    args = make_parser(argv).parse(argv)
    platform_tuning.begin_start()  # until the engine is loaded
    try:
        return run(args)
    finally:
        gc.enable()


def run(args: argparse.Namespace) -> int:
    from ...ipc.early_engine import early_engine
    from ...ipc.early_process import end_early_process
    from ..server.config import ServerConfig

    config = ServerConfig(**given(args, server_flags()))
    # A daemon has its own settings: the model and everything else not given here come from it.
    arguments = given(args, engine_flags())
    if config.lora_modules:
        arguments.setdefault("enable_lora", True)
    is_several = len(args.models) > 1 or any(hasattr(args, name) for name in OF_SEVERAL)
    if is_several or config.allow_model_changes:
        if config.api_server_count > 1:
            raise InvalidParameterError("api_server_count", "must be 1 with several models")
        from ..server.serving import serve

        end_early_process()
        with naming_sources(args.settings):
            return serve(config, served_models(args, arguments), ENGINE.default, arguments)
    engine = getattr(args, "engine", ENGINE.default)
    if config.api_server_count > 1:
        from ..engine_args import EngineArgs
        from ..server.serving import serve_several

        end_early_process()
        engine_args = EngineArgs(**arguments)
        with naming_sources(args.settings), plan_beneath(engine_args, arguments):
            return serve_several(config, engine_args, engine, given(args, server_flags()))
    configure_logging(log_level_of(config.log_level), config.log_format)
    with early_engine(engine, arguments):
        from ..engine_args import EngineArgs
        from ..server.serving import serve

        engine_args = EngineArgs(**arguments)
        with naming_sources(args.settings), plan_beneath(engine_args, arguments):
            return serve(config, engine_args, engine)


def served_models(args: argparse.Namespace, arguments: dict[str, Any]) -> list[ServedModel]:
    """Returns every model of the command line with its engine settings: those of all models, and
    its own from --model-options.
    """
    from ..engine_args import EngineArgs
    from ..server.served_models import ServedModel

    for name in ("served_model_name", "engine"):
        if hasattr(args, name):
            raise InvalidParameterError(
                name,
                "is for one model; with several, NAME=MODEL names one, and each has a process",
            )
    for name, is_given in (
        ("standby", arguments.get("standby")),
        ("lora_modules", hasattr(args, "lora_modules")),
        ("model_aliases", hasattr(args, "model_aliases")),
    ):
        if is_given:
            raise InvalidParameterError(name, "is for one model")
    named = [split_name(model) for model in args.models or [arguments.get("model", "bundled")]]
    names = [name for name, _ in named]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidParameterError("model", f"{twice} is there twice; NAME=MODEL renames one")
    flags = {flag.name: flag for flag in engine_flags(without=("model", "served_model_name"))}
    options = read_options(getattr(args, "model_options", None), flags, names)
    served = []
    for name, model in named:
        own: dict[str, Any] = arguments | {"model": model} | options.get(name, {})
        served.append(ServedModel(name, EngineArgs(**own)))
    return served


def split_name(model: str) -> tuple[str, str]:
    """Splits small=org/name into (small, org/name), and org/name into (org/name, org/name)."""
    name, equals, rest = model.partition("=")
    if equals and name and rest and "/" not in name:
        return name, rest
    return model, model


def read_options(
    file: str | None, flags: Mapping[str, Flag], names: list[str]
) -> dict[str, dict[str, Any]]:
    """Returns the engine settings of each model, by name."""
    if file is None:
        return {}
    sections = read_sections(flags, file, "--model-options", "quire serve")
    for name in sections:
        if name not in names:
            raise InvalidParameterError(
                "--model-options",
                f"{file}: no model is called {name!r}; there are: {', '.join(names)}",
            )
    return sections
