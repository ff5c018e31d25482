"""Command-line flags made from the fields of the configuration trees and of SamplingParams, and the parser that reads them.
May know: names, types, ranges, defaults and descriptions of those fields; sources.py, for what is not on the command line.
Must not know: what any of them does."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, get_args

import msgspec

from ...ipc.config import config_fields
from ...ipc.params import SamplingParams
from .values import from_text, is_literal, plain_type

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


# Never printed, whatever asks for the settings or complains about them.
SECRETS = frozenset({"api_key"})


@dataclass(frozen=True)
class Flag:
    """One field as a flag. `type` is the field's annotation; `default` is only shown: a flag that is not given leaves no trace."""

    name: str
    type: Any
    default: Any
    help: str
    check: Callable[[Any], None] | None = None  # raises ValueError with a sentence, for what the type cannot say
    positional: bool = False
    decided_later: bool = False  # the default is what somebody else makes of it: the model's recommendation, a random number

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "QUIRE_" + self.name.upper()

    @property
    def secret(self) -> bool:
        return self.name in SECRETS


def _check_engine(where: str) -> None:
    if where not in ("inproc", "process") and not where.startswith("ipc://"):
        raise ValueError(f"must be inproc, process or an address ipc://PATH, got {where!r}")


ENGINE = Flag(
    "engine", str, "process", "process: a child process; inproc: this process; ipc://PATH: a daemon that `quire engine` started.", _check_engine
)
def _check_keys(keys: list[str]) -> None:
    if not all(keys):
        raise ValueError("must not hold an empty key")


LISTEN = Flag("listen", str | None, None, "Where programs attach: ipc:// and the path of a socket file.")


def engine_flags() -> list[Flag]:
    return _flags_of({name: field for name, (_, field) in config_fields().items()})


def server_flags() -> list[Flag]:
    from ..server.config import server_fields

    return [replace(flag, check=_check_keys) if flag.secret else flag for flag in _flags_of(server_fields())]


def _flags_of(fields: Mapping[str, msgspec.structs.FieldInfo]) -> list[Flag]:
    return [Flag(name, field.type, _default(field), _description(field.type)) for name, field in fields.items()]


def sampling_flags() -> list[Flag]:
    fields = [field for field in msgspec.structs.fields(SamplingParams) if field.name not in NOT_SAMPLING_FLAGS]
    return [Flag(field.name, field.type, _default(field), SAMPLING_HELP[field.name]) for field in fields]


def all_flag_names() -> set[str]:
    """The settings of any command: a variable of another command's is no mistake."""
    return {flag.name for flag in (*engine_flags(), *server_flags(), *sampling_flags(), ENGINE, LISTEN)}


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return field.default_factory() if field.default is msgspec.NODEFAULT else field.default


def _description(annotation: Any) -> str:
    return next((meta.description for meta in getattr(annotation, "__metadata__", ()) if meta.description), "")


class Parser(argparse.ArgumentParser):
    """argparse with one sentence per mistake (exit code 2), the nearest flag for an unknown one, a short and a full help; and the
    settings that its flags stand for may come from the environment or a file as well (sources.py)."""

    def __init__(self, prog: str, usage: str, description: str, *, show_all: bool = False):
        super().__init__(prog=prog, usage=usage, description=description, add_help=False, allow_abbrev=False)
        self.show_all = show_all
        self.groups: list[tuple[str, list[Flag]]] = []
        self.add_argument("-h", "--help", action="help", help="show the most used flags")
        self.add_argument("--help-all", action="help", help="show all flags, and their environment variables")

    def add_flags(self, title: str, flags: Iterable[Flag], common: tuple[str, ...]) -> None:
        """Adds a group of flags; those that `common` does not name appear only under --help-all."""
        group = self.add_argument_group(title)
        self.groups.append((title, list(flags)))
        for flag in self.groups[-1][1]:
            group.add_argument(flag.option, dest=flag.name, default=argparse.SUPPRESS, **self._options(flag, flag.name in common))

    def add_model(self) -> None:
        """The model as an argument without a name. It is a setting like any other, and not also a flag."""
        (flag,) = [replace(flag, positional=True) for flag in engine_flags() if flag.name == "model"]
        self.groups.append(("model", [flag]))
        self.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=self._help(flag))

    def _add_sources(self) -> None:
        """Last, so that they stand behind the command's own in the help."""
        group = self.add_argument_group("settings")
        group.add_argument("--config", metavar="FILE", help="YAML, TOML or JSON file with settings by name; flags and QUIRE_<NAME> variables win over it")
        group.add_argument("--print-config", action="store_true", help="print every setting with where it came from, and leave")
        if self.show_all:
            from .sources import OTHER_VARIABLES

            others = "; ".join(f"{name} ({what})" for name, what in OTHER_VARIABLES.items())
            self.epilog = (
                "In variables and files a switch is on or off, lists and objects are JSON in a variable (a list of one text may be that text). "
                f"Further variables: {others}; HF_HOME and HF_HUB_OFFLINE (the hub's); OMP_NUM_THREADS."
            )

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """The arguments, and the settings from everywhere as attributes; `settings` says where each came from.

        With --print-config it prints them and raises SystemExit(0). Raises InvalidParameterError for a bad file or variable.
        """
        if self.groups:
            self._add_sources()
        args, unknown = self.parse_known_intermixed_args(argv)
        if unknown:
            self.error(self._unknown(unknown[0]))
        if self.groups:
            self._add_settings(args)
        return args

    def _add_settings(self, args: argparse.Namespace) -> None:
        from .sources import collect, render

        flags = {flag.name: flag for _, group in self.groups for flag in group}
        args.settings = collect(flags, given(args, flags.values()), args.config, self.prog)
        for name, setting in args.settings.items():
            setattr(args, name, setting.value)
        if args.print_config:
            print(render(self.groups, args.settings, self.prog), end="")
            self.exit()

    def _options(self, flag: Flag, is_common: bool) -> dict[str, Any]:
        """The keyword arguments of add_argument for this flag's type."""
        plain = plain_type(flag.type)
        help_text = self._help(flag) if is_common or self.show_all else argparse.SUPPRESS
        if plain is bool:
            return {"action": argparse.BooleanOptionalAction, "help": help_text}
        if is_literal(flag.type):
            choices = get_args(plain)
            return {"type": type(choices[0]), "choices": choices, "help": help_text}
        if plain == list[str]:
            return {"action": "append", "metavar": "TEXT", "help": help_text}
        metavar = {int: "N", float: "X", str: "TEXT", list[int]: "ID,ID"}.get(plain, "JSON")
        return {"type": _converter(flag), "metavar": metavar, "help": help_text}

    def _help(self, flag: Flag) -> str:
        default = flag.default
        if isinstance(default, bool):
            shown = "on" if default else "off"
        else:
            shown = "" if default in (None, [], {}) or "Default:" in flag.help else json.dumps(default) if isinstance(default, dict) else str(default)
        marks = [shown] * bool(shown) + [flag.variable] * self.show_all
        return (flag.help + (f" [{', '.join(marks)}]" if marks else "")).replace("%", "%%")

    def _unknown(self, word: str) -> str:
        option = word.split("=")[0]
        known = [name for action in self._actions for name in action.option_strings if name.startswith("--")]
        near = difflib.get_close_matches(option, known, n=1)
        kind = "flag" if option.startswith("-") else "argument"
        return f"unknown {kind} {option}; " + (f"did you mean {near[0]}?" if near else f"see {self.prog} --help-all")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _converter(flag: Flag) -> Callable[[str], Any]:
    """For argparse: text -> the field's value."""

    def convert(text: str) -> Any:
        try:
            return from_text(flag, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def given(args: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    """Those of the flags' settings that were given anywhere."""
    return {flag.name: getattr(args, flag.name) for flag in flags if hasattr(args, flag.name)}
