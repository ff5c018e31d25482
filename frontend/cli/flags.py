"""Command-line flags made from the fields of the configuration tree and of SamplingParams, and the parser that reads them.
May know: names, types, ranges, defaults and descriptions of those fields.
Must not know: what any of them does."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin

import msgspec

from ...ipc.config import config_fields
from ...ipc.errors import InvalidParameterError
from ...ipc.params import SamplingParams, StructuredOutputsParams
from ..engine_args import describe_type

SAMPLING_HELP = {
    "n": "Completions per prompt.",
    "temperature": "0: always the likeliest token; higher: more varied.",
    "top_p": "Sample from the likeliest tokens that hold this share of the probability.",
    "top_k": "Sample from this many likeliest tokens; 0: all.",
    "min_p": "Leave out tokens less likely than this fraction of the likeliest one.",
    "seed": "Seed of the random numbers: the same seed, prompt and flags give the same tokens.",
    "presence_penalty": "Taken from the logit of every token that has appeared in the output.",
    "frequency_penalty": "Taken from a token's logit for each time it has appeared in the output.",
    "repetition_penalty": "Divides the logits of tokens seen in prompt or output; 1: off.",
    "max_tokens": "Most tokens of one completion; none: to the end of the context.",
    "min_tokens": "Tokens before the completion may end.",
    "stop": "End before this text; may be repeated.",
    "stop_token_ids": "End after one of these token ids.",
    "include_stop_str_in_output": "Leave the stop text in the output.",
    "ignore_eos": "Go on after the end-of-sequence token.",
    "logprobs": "Report the log-probabilities of this many likeliest tokens (with --json).",
    "prompt_logprobs": "The same for the tokens of the prompt.",
    "skip_special_tokens": "Leave special tokens out of the text.",
    "spaces_between_special_tokens": "Put spaces between special tokens.",
    "logit_bias": "Added to the logits of these token ids.",
    "allowed_token_ids": "Sample from these token ids only.",
    "bad_words": "Never produce this text; may be repeated.",
    "structured_outputs": 'What the output must be: {"json": SCHEMA}, {"regex": TEXT}, {"choice": [TEXT]}, {"grammar": LARK} or {"json_object": true}.',
    "truncate_prompt_tokens": "Keep only the last so many tokens of the prompt; -1: as many as the context takes.",
    "extra_args": "For logits processors of your own.",
}
# The command itself decides how it wants its outputs; the token ids of bad words are not the user's to give.
NOT_SAMPLING_FLAGS = frozenset({"output_kind", "detokenize", "stream_interval", "bad_words_token_ids"})


@dataclass(frozen=True)
class Flag:
    """One field as a flag. `type` is the field's annotation; `default` is only shown: a flag that is not given leaves no trace."""

    name: str
    type: Any
    default: Any
    help: str

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")


def engine_flags() -> list[Flag]:
    return [Flag(name, field.type, _default(field), _description(field.type)) for name, (_, field) in config_fields().items()]


def sampling_flags() -> list[Flag]:
    fields = [field for field in msgspec.structs.fields(SamplingParams) if field.name not in NOT_SAMPLING_FLAGS]
    return [Flag(field.name, field.type, _default(field), SAMPLING_HELP[field.name]) for field in fields]


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def _description(annotation: Any) -> str:
    return next((meta.description for meta in getattr(annotation, "__metadata__", ()) if meta.description), "")


def _plain_type(annotation: Any) -> Any:
    """Annotated[X | None, ...] -> X; of several alternatives the last one, which is the widest (str | list[str] -> list[str])."""
    if get_origin(annotation) is Annotated:
        return _plain_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return _plain_type([arg for arg in get_args(annotation) if arg is not type(None)][-1])
    return annotation


class Parser(argparse.ArgumentParser):
    """argparse with one sentence per mistake (exit code 2), the nearest flag for an unknown one, and a short and a full help."""

    def __init__(self, prog: str, usage: str, description: str, *, show_all: bool = False):
        super().__init__(prog=prog, usage=usage, description=description, add_help=False, allow_abbrev=False)
        self.show_all = show_all
        self.add_argument("-h", "--help", action="help", help="show the most used flags")
        self.add_argument("--help-all", action="help", help="show all flags")

    def add_flags(self, title: str, flags: Iterable[Flag], common: tuple[str, ...]) -> None:
        """Adds a group of flags; those that `common` does not name appear only under --help-all."""
        group = self.add_argument_group(title)
        for flag in flags:
            options = _argparse_options(flag)
            if flag.name not in common and not self.show_all:
                options["help"] = argparse.SUPPRESS
            group.add_argument(flag.option, dest=flag.name, default=argparse.SUPPRESS, **options)

    def parse(self, argv: list[str]) -> argparse.Namespace:
        args, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            self.error(self._unknown(unknown[0]))
        return args

    def _unknown(self, word: str) -> str:
        option = word.split("=")[0]
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        near = difflib.get_close_matches(option, known, n=1)
        kind = "flag" if option.startswith("-") else "argument"
        return f"unknown {kind} {option}; " + (f"did you mean {near[0]}?" if near else f"see {self.prog} --help-all")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _argparse_options(flag: Flag) -> dict[str, Any]:
    """The keyword arguments of add_argument for this field's type."""
    plain = _plain_type(flag.type)
    default = "none" if flag.default is None else json.dumps(flag.default) if isinstance(flag.default, dict) else flag.default
    names_default = "Default:" in flag.help or flag.default is None
    help_text = (flag.help if names_default else f"{flag.help} [{default}]").replace("%", "%%")
    if plain is bool:
        return {"action": argparse.BooleanOptionalAction, "help": f"{flag.help} [{'on' if flag.default else 'off'}]"}
    if get_origin(plain) is Literal:
        choices = get_args(plain)
        return {"type": type(choices[0]), "choices": choices, "help": help_text}
    if plain == list[str]:
        return {"action": "append", "metavar": "TEXT", "help": help_text}
    metavar = {int: "N", float: "X", str: "TEXT", list[int]: "ID,ID"}.get(plain, "JSON")
    return {"type": _converter(flag.type, plain), "metavar": metavar, "help": help_text}


def _converter(annotation: Any, plain: Any) -> Callable[[str], Any]:
    """text -> value, by msgspec's lax conversion, so that a flag accepts exactly what its field accepts."""

    def convert(text: str) -> Any:
        try:
            if get_origin(plain) is dict or plain is StructuredOutputsParams:
                value: Any = json.loads(text)
            elif get_origin(plain) is list:
                value = text.split(",")
            else:
                value = None if text.lower() == "none" and plain is not str else text
            value = convert_plain(value, annotation, strict=False)
        except InvalidParameterError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        except json.JSONDecodeError as error:
            raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r} ({error})") from None
        except msgspec.ValidationError:
            raise argparse.ArgumentTypeError(f"must be {_wanted(annotation, plain)}, got {text!r}") from None
        if isinstance(value, float) and not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"must be a finite number, got {text!r}")
        return value

    return convert


def convert_plain(value: Any, annotation: Any, *, strict: bool) -> Any:
    """A value as JSON gives it -> a field's. Raises msgspec.ValidationError, or InvalidParameterError from within."""
    if _plain_type(annotation) is not StructuredOutputsParams or value is None:
        return msgspec.convert(value, annotation, strict=strict, str_keys=True)
    msgspec.convert(value, dict[str, Any])
    if unknown := value.keys() - set(StructuredOutputsParams.__struct_fields__):
        raise InvalidParameterError("structured_outputs", f"has no {min(unknown)!r}; it has {', '.join(StructuredOutputsParams.__struct_fields__)}")
    return StructuredOutputsParams(**value)


def _wanted(annotation: Any, plain: Any) -> str:
    spelled_otherwise = {
        list[int]: "integers separated by commas",
        dict[int, float]: 'a JSON object {"token id": number}',
        dict[str, str]: 'a JSON object {"name": "text"}',
        dict[str, Any]: "a JSON object",
        StructuredOutputsParams: 'a JSON object such as {"regex": "[0-9]+"}',
    }
    return spelled_otherwise.get(plain) or describe_type(annotation)


def given(args: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """Those of the flags that were on the command line."""
    return {flag.name: getattr(args, flag.name) for flag in flags if hasattr(args, flag.name)}
