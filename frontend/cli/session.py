"""What generate and chat share: the flags that choose and configure an engine, and the engine itself, opened and closed.
May know: LLMEngine, EngineArgs, the names and forms of an engine.
Must not know: prompts, what is printed."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from ...ipc.params import SamplingParams
from .flags import Flag, Parser, engine_flags, given, sampling_flags
from .terminal import Dim

if TYPE_CHECKING:
    from ..llm_engine import LLMEngine

COMMON_ENGINE = ("model", "dtype", "max_model_len", "seed")
SEED_HELP = "Seed of the random numbers: the same seed, prompts and flags give the same tokens."


def session_flags() -> list[Flag]:
    """The engine's flags; its `seed` is drawn anew for every run, so that a story told twice is not the same story."""
    return [dataclasses.replace(flag, default="random", help=SEED_HELP) if flag.name == "seed" else flag for flag in engine_flags()]


def request_flags(**defaults: Any) -> list[Flag]:
    """The sampling flags without the request's own seed (--seed is the run's), with these defaults shown."""
    flags = [flag for flag in sampling_flags() if flag.name != "seed"]
    return [dataclasses.replace(flag, default=defaults[flag.name]) if flag.name in defaults else flag for flag in flags]


def add_session_flags(parser: Parser, flags: list[Flag] | None = None) -> None:
    """`flags`: the engine's, if they are not session_flags."""
    parser.add_flags("engine", session_flags() if flags is None else flags, COMMON_ENGINE)
    parser.add_argument(
        "--engine",
        metavar="WHERE",
        type=_engine,
        default="process",
        help="process: a child process [default]; inproc: this process; ipc://PATH: a daemon that `quire engine` started",
    )


def _engine(text: str) -> str:
    if text in ("inproc", "process") or text.startswith("ipc://"):
        return text
    raise argparse.ArgumentTypeError(f"must be inproc, process or an address ipc://PATH, got {text!r}")


@contextmanager
def open_engine(args: argparse.Namespace) -> Iterator[LLMEngine]:
    """The engine that the flags ask for, ready; shut down on the way out. On a terminal, standard error says what takes the time."""
    from ..engine_args import EngineArgs
    from ..llm_engine import LLMEngine

    engine_args = EngineArgs(**{"seed": secrets.randbits(63)} | given(args, engine_flags()))
    notice = Dim(sys.stderr)(f"loading {engine_args.model} ...") if sys.stderr.isatty() else ""
    print(notice, end="\r" if notice else "", file=sys.stderr, flush=True)
    engine = LLMEngine.from_engine_args(engine_args, engine=args.engine)
    try:
        print("\x1b[K" if notice else "", end="", file=sys.stderr, flush=True)
        yield engine
    finally:
        engine.shutdown()


def default_sampling(engine: LLMEngine, **defaults: Any) -> dict[str, Any]:
    """Sampling parameters before the flags: the command's own defaults, and over them what the model's authors recommend."""
    vllm, recommended = msgspec.structs.asdict(SamplingParams()), msgspec.structs.asdict(engine.get_default_sampling_params())
    return defaults | {name: value for name, value in recommended.items() if value != vllm[name]}


def check_sampling(sampling: dict[str, Any]) -> None:
    """Refuses bad values before an engine is started."""
    SamplingParams(**sampling)
