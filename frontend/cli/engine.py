"""`quire engine`: loads a model once and serves it to every program that attaches at an address.

Must not know: what the daemon does. This process turns into the daemon, or starts several engines
and watches them.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from ...ipc.errors import InvalidParameterError, QuireError
from ...ipc.process import INTERRUPTS_IGNORED, exec_daemon, ignores_interrupts
from .flags import LISTEN, REPLACE, engine_flags, given
from .parser import Parser
from .plan import render
from .sources import naming_sources

if TYPE_CHECKING:
    from ..engine_args import EngineArgs

USAGE = "--listen ipc://PATH [MODEL] [engine flags]"
DESCRIPTION = (
    "Loads MODEL and serves programs that attach with LLM(engine=...) or --engine at this "
    "address, until SIGTERM or Ctrl-C."
)
COMMON = (
    "dtype",
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "num_threads",
)


def make_parser(argv: list[str]) -> Parser:
    parser = Parser("engine", USAGE, DESCRIPTION, argv)
    parser.add_model()
    parser.add_flags("daemon", [LISTEN, REPLACE], ("listen", "replace"))
    # The programs that attach choose the seed. The model is an argument here, without --model.
    parser.add_flags("engine", engine_flags(without=("model", "seed")), COMMON)
    return parser


def main(argv: list[str]) -> int:
    parser = make_parser(argv)
    args = parser.parse(argv)
    listen = getattr(args, "listen", None)
    if listen is None:
        parser.error("the following arguments are required: --listen")
    from ..clients.replicas.start import daemon_configs
    from ..engine_args import EngineArgs

    with naming_sources(args.settings):
        engine_args = EngineArgs(**given(args, engine_flags()))
        config = engine_args.create_engine_config()
        configs = daemon_configs(config)
        replaces = getattr(args, "replace", False)
        if replaces and len(configs) > 1:
            raise InvalidParameterError("replace", "needs data_parallel_size=1")
    print(f"quire engine: starting {engine_args.model} at {listen}", file=sys.stderr)
    if ignores_interrupts():
        print(f"quire engine: {INTERRUPTS_IGNORED}", file=sys.stderr)
    warn_if_too_large(engine_args, given(args, engine_flags()))
    if len(configs) == 1:
        exec_daemon(listen, config, replaces=replaces)
    from ..supervision.engine_daemon import run_daemon

    with naming_sources(args.settings):
        return run_daemon(configs, listen)


def warn_if_too_large(engine_args: EngineArgs, arguments: dict[str, Any]) -> None:
    """Prints a warning if the model probably does not fit into memory. This process becomes the
    daemon, whose own error has no plan that explains it.
    """
    from ..model_info.plan import make_plan

    with contextlib.suppress(QuireError):  # a model known to a plug-in only has no plan
        plan = make_plan(engine_args, given=arguments)
        if not plan.fits:
            print(f"quire engine: it will probably not fit\n\n{render(plan)}", file=sys.stderr)
