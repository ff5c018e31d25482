"""Command-line flags made from the fields of the configuration trees and of SamplingParams.

Must not know: the effect of any flag, where its value comes from.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from ...ipc.config import ConfigField, config_fields
from ...ipc.errors import InvalidParameterError
from ...ipc.params import SamplingParams
from ..arguments import vllm_arguments

SAMPLING_HELP = {
    "n": "Completions per prompt.",
    "temperature": "0: always the most likely token; higher: more varied. Default: the "
    "model's, else 1.",
    "top_p": "Sample from the most likely tokens with this total probability. Default: the "
    "model's, else 1.",
    "top_k": "Sample from this many most likely tokens; 0: all. Default: the model's, else 0.",
    "min_p": "Omit tokens less likely than this fraction of the most likely token's probability. "
    "Default: the model's, else 0.",
    "seed": "Seed of the random numbers: the same seed, prompt and flags give the same tokens.",
    "presence_penalty": "Subtracted from the logit of every token in the output.",
    "frequency_penalty": "Subtracted from a token's logit for each occurrence in the output.",
    "repetition_penalty": "Divides the logits of tokens in the prompt or output; 1: off. "
    "Default: the model's, else 1.",
    "max_tokens": "Maximum tokens of one completion; none: to the end of the context.",
    "min_tokens": "Minimum tokens of one completion.",
    "timeout_s": "End so many seconds after the start with finish reason timeout; none: no limit.",
    "stop": "End before this text; may be repeated.",
    "stop_token_ids": "End after one of these token ids.",
    "include_stop_str_in_output": "Keep the stop text in the output.",
    "ignore_eos": "Continue after the end-of-sequence token.",
    "logprobs": "Report the log-probabilities of this many most likely tokens (with --json).",
    "prompt_logprobs": "The same for the tokens of the prompt.",
    "skip_special_tokens": "Omit special tokens from the text.",
    "spaces_between_special_tokens": "Put spaces between special tokens.",
    "logit_bias": "Added to the logits of these token ids.",
    "allowed_token_ids": "Sample from these token ids only.",
    "bad_words": "Never produce this text; may be repeated.",
    "structured_outputs": 'Constraint on the output: {"json": SCHEMA}, {"regex": TEXT}, {"choice": '
    '[TEXT]}, {"grammar": LARK} or {"json_object": true}.',
    "truncate_prompt_tokens": "Keep only this many last tokens of the prompt; -1: as many as the "
    "context takes.",
    "extra_args": "Arguments for custom logits processors.",
}
# The command itself chooses the kind of its outputs. The token ids of bad words are internal.
NOT_SAMPLING_FLAGS = frozenset(
    {"output_kind", "detokenize", "stream_interval", "bad_words_token_ids"}
)


class Flag(msgspec.Struct, frozen=True):
    """One field as a flag.

    `type` is the field's annotation. `default` is for display only: a flag that is not given sets
    nothing.
    """

    name: str
    type: Any
    default: Any
    help: str
    # raises ValueError with a sentence, for conditions beyond the type
    check: Callable[[Any], None] | None = None
    positional: bool = False
    # the default comes from elsewhere: the model's recommendation, a random number
    decided_later: bool = False
    topic: str = ""  # the name of a group of the full help
    is_secret: bool = False
    aliases: tuple[str, ...] = ()  # further options, or names of arguments

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def options(self) -> list[str]:
        """The option and its aliases on the command line."""
        others = (
            alias if alias.startswith("-") else "--" + alias.replace("_", "-")
            for alias in self.aliases
        )
        return [self.option, *others]

    @property
    def variable(self) -> str:
        return "QUIRE_" + self.name.upper()


def _check_engine(where: str) -> None:
    if where not in ("inproc", "process") and not where.startswith("ipc://"):
        raise ValueError(f"must be inproc, process or an address ipc://PATH, got {where!r}")


ENGINE = Flag(
    "engine",
    str,
    "process",
    "process: a child process; inproc: this process; ipc://PATH: a daemon that `quire engine` "
    "started.",
    _check_engine,
)


def _check_keys(keys: list[str]) -> None:
    if not all(keys):
        raise ValueError("must not hold an empty key")


LISTEN = Flag(
    "listen", str | None, None, "Address for clients: ipc:// and the path of a socket file."
)


REPLACE = Flag(
    "replace",
    bool,
    False,
    "When the model is loaded, take the address over from the engine that listens there; its "
    "clients continue here.",
)


def engine_flags(*, without: Collection[str] = ()) -> list[Flag]:
    return [_flag_of(field) for name, field in config_fields().items() if name not in without]


def server_flags() -> list[Flag]:
    from ..server.config import server_fields

    flags = map(_flag_of, server_fields().values())
    return [replace(flag, check=_check_keys) if flag.is_secret else flag for flag in flags]


def vllm_flags(*, of_server: bool) -> list[Flag]:
    """Returns the flags of `vllm serve` that Quire does not have. vllm_arguments.py accepts or
    rejects them.
    """
    own = {*config_fields(), *(flag.name for flag in server_flags())}
    names = vllm_arguments.NAMES - own - (frozenset() if of_server else vllm_arguments.SERVER_NAMES)
    return [
        Flag(
            name,
            bool if name in vllm_arguments.SWITCHES else Any,
            None,
            "vLLM's.",
            partial(_accept, name),
            is_secret=name == vllm_arguments.HUB_TOKEN,
            aliases=vllm_arguments.SHORT_OPTIONS.get(name, ()),
        )
        for name in sorted(names)
    ]


def _accept(name: str, value: Any) -> None:
    try:
        vllm_arguments.accept(name, value)
    except InvalidParameterError as error:
        raise ValueError(error.problem) from None


def _flag_of(field: ConfigField) -> Flag:
    return Flag(
        field.name,
        field.type,
        field.default,
        field.help,
        topic=field.section.removesuffix("_config"),
        is_secret=field.is_secret,
        aliases=field.aliases,
    )


def sampling_flags() -> list[Flag]:
    defaults = SamplingParams()
    return [
        Flag(field.name, field.type, getattr(defaults, field.name), SAMPLING_HELP[field.name])
        for field in msgspec.structs.fields(SamplingParams)
        if field.name not in NOT_SAMPLING_FLAGS
    ]


def all_flag_names() -> set[str]:
    """Returns the names of all commands' settings. A variable for another command is not an
    error.
    """
    of_daemons = (ENGINE, LISTEN, REPLACE)
    flags = (*engine_flags(), *server_flags(), *sampling_flags(), *of_daemons)
    return {flag.name for flag in flags}


def given(args: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """Returns the settings of these flags that were given by any source."""
    return {flag.name: getattr(args, flag.name) for flag in flags if hasattr(args, flag.name)}
