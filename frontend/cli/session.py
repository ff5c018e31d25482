"""The flags and the context of an engine, which the commands with an engine share.

Must not know: prompts, what is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from msgspec.structs import replace

from ...ipc.config import config_fields
from ...ipc.errors import InvalidParameterError
from ...ipc.lora import LoRARequest
from ...ipc.params import SamplingParams
from .flags import ENGINE, Flag, engine_flags, given, sampling_flags
from .parser import Parser
from .plan import plan_beneath
from .sources import naming_sources
from .terminal import Dim
from .values import plain_type

if TYPE_CHECKING:
    from ..llm_engine import LLMEngine

COMMON_ENGINE = ("model", "dtype", "quantization", "num_threads", "seed", "engine")
SEED_HELP = "Seed of the random numbers: the same seed, prompts and flags give the same tokens."

LORA = Flag("lora", str | None, None, "Directory of a LoRA adapter, which every prompt uses.")


def session_flags(without: tuple[str, ...] = ()) -> list[Flag]:
    """Returns the engine's flags. Its `seed` is random for every run, so that repeated runs
    differ.
    """
    random_seed = {"default": "random", "help": SEED_HELP, "decided_later": True}
    return [
        replace(flag, **random_seed) if flag.name == "seed" else flag
        for flag in engine_flags(without=without)
    ] + [ENGINE, LORA]


def request_flags(**defaults: Any) -> list[Flag]:
    """Returns the sampling flags without the request's seed (--seed applies to the run), with these
    defaults shown. The model may recommend other values.
    """
    return [
        replace(flag, decided_later=True, default=defaults.get(flag.name, flag.default))
        for flag in sampling_flags()
        if flag.name != "seed"
    ]


def add_session_flags(parser: Parser, *, without: tuple[str, ...] = ()) -> None:
    parser.add_flags("engine", session_flags(without), COMMON_ENGINE)


@contextmanager
def open_engine(args: argparse.Namespace) -> Iterator[LLMEngine]:
    """Yields the engine that the flags configure, and shuts it down at exit.

    If stderr is a terminal, it shows what is being loaded.
    """
    import secrets

    from ...ipc.early_engine import early_engine

    arguments: dict[str, Any] = {"seed": secrets.randbits(63)} | given(args, engine_flags())
    kind = getattr(args, "engine", ENGINE.default)
    lora_request = lora_of(args)
    if lora_request is not None:
        arguments = lora_arguments(lora_request.lora_path) | arguments
    with early_engine(kind, arguments):
        from ..engine_args import EngineArgs
        from ..llm_engine import LLMEngine

        engine_args = EngineArgs(**arguments)
        with (
            loading_notice(engine_args.model),
            naming_sources(args.settings),
            plan_beneath(engine_args, given(args, engine_flags())),
        ):
            engine = LLMEngine.from_engine_args(engine_args, engine=kind)
    try:
        if lora_request is not None:
            engine.add_lora(lora_request)
        yield engine
    finally:
        engine.shutdown()


@contextmanager
def loading_notice(model: str) -> Iterator[None]:
    """Shows a line on stderr, if that is a terminal, while the context lasts. However it ends, the
    line is cleared, and with it the ^C that a terminal shows.
    """
    if not sys.stderr.isatty():
        yield
        return
    print(Dim(sys.stderr)(f"loading {model} ..."), end="\r", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def lora_of(args: argparse.Namespace) -> LoRARequest | None:
    """Returns the adapter of --lora."""
    path = getattr(args, "lora", None)
    return None if path is None else LoRARequest("lora", 1, path)


def lora_arguments(path: str) -> dict[str, Any]:
    """Returns the engine's arguments for an adapter. They include its rank if adapter_config.json
    states one. Errors in that file are reported when the adapter is loaded.
    """
    arguments: dict[str, Any] = {"enable_lora": True}
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
        config = json.loads((Path(path).expanduser() / "adapter_config.json").read_bytes())
        rank = max(config["r"], *(config.get("rank_pattern") or {}).values(), 1)
        ranks = get_args(plain_type(config_fields()["max_lora_rank"].type))
        arguments["max_lora_rank"] = next((r for r in ranks if r >= rank), ranks[-1])
    return arguments


def require_generation(engine: LLMEngine) -> None:
    """Raises InvalidParameterError for a model that only pools."""
    config = engine.config.model_config
    if config.runner == "pooling":
        tasks = ", ".join(config.pooling.tasks if config.pooling else ())
        raise InvalidParameterError(
            "model", f"{config.served_model_name} generates no text; it can {tasks}: quire embed"
        )


def default_sampling(engine: LLMEngine, **defaults: Any) -> dict[str, Any]:
    """Returns sampling parameters before the flags apply: the model's recommendations over the
    command's defaults.
    """
    vllm = msgspec.structs.asdict(SamplingParams())
    recommended = msgspec.structs.asdict(engine.get_default_sampling_params())
    return defaults | {name: value for name, value in recommended.items() if value != vllm[name]}


def check_sampling(sampling: dict[str, Any]) -> None:
    """Rejects invalid values before an engine is started."""
    SamplingParams(**sampling)
