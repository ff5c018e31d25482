"""The parser of a command's flags: it has one-sentence errors, a short and a full help, and
settings from other sources.

Must not know: the effect of any flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from msgspec.structs import replace

from ...ipc.checks import closest
from ..arguments.vllm_arguments import spelled
from .flags import Flag, engine_flags, given, vllm_flags
from .values import from_text, is_literal, plain_type

MODEL_OPTION = "model_option"  # where argparse stores --model
NAMES = "served_model_name"  # takes several words where several models may be given
SEVERAL_WORDS = frozenset({"lora_modules"})  # flags that take several words at once, as in vLLM


TYPES = {"N": int, "X": float, "S": float}  # placeholder of a value -> its type; else text


@dataclass(frozen=True)
class Adder:
    """Adds arguments that are no settings: the environment and files do not have them. Rare ones
    are shown by --help-all only.
    """

    group: Any  # of argparse: a parser, or a group of its arguments
    show_all: bool

    def __call__(
        self,
        option: str,
        placeholder: str | None,
        help: str,
        default: Any = None,
        *,
        rare: bool = False,
        **arguments: Any,
    ) -> None:
        if "action" not in arguments:
            help += f" [{default}]" if default not in (None, []) else ""
            kind = TYPES.get(placeholder or "", str)
            arguments = {"type": kind, "metavar": placeholder} | arguments
        self.group.add_argument(
            option,
            default=default,
            help=argparse.SUPPRESS if rare and not self.show_all else help.replace("%", "%%"),
            **arguments,
        )

    def fields(self, options: type, *names: str) -> None:
        """Adds flags of these fields of a dataclass, whose annotations hold a placeholder, the
        help, and "rare" for a rare one. Without names it adds all that have a help.
        """
        hints = get_type_hints(options, include_extras=True)
        defaults = {field.name: field.default for field in dataclasses.fields(options)}
        for name in names or [name for name in hints if get_origin(hints[name]) is Annotated]:
            kind, placeholder, text, *marks = get_args(hints[name])
            option, rare = "--" + name.removesuffix("_s").replace("_", "-"), "rare" in marks
            choices = {"choices": get_args(kind)} if get_origin(kind) is Literal else {}
            if kind is bool:
                self.switch(option, text, rare=rare)
            else:
                self(option, placeholder, text, defaults[name], rare=rare, **choices)

    def switch(self, option: str, help: str, *, rare: bool = False) -> None:
        """Adds a flag without a value."""
        self(option, None, help, False, rare=rare, action="store_true")

    def on_off(self, option: str, help: str, default: bool | None = None) -> None:
        """Adds a flag that --no-... turns off; `help` says its default."""
        self(option, None, help, default, action=argparse.BooleanOptionalAction)


class Parser(argparse.ArgumentParser):
    """Adds to argparse one-sentence errors (exit code 2), a suggestion for an unknown flag, and a
    short and a full help. The settings of its flags may also come from the environment or a file
    (sources.py).
    """

    def __init__(self, command: str, arguments: str, description: str, argv: list[str]):
        prog = f"quire {command}"
        super().__init__(
            prog=prog,
            usage=f"{prog} {arguments}",
            description=description,
            add_help=False,
            allow_abbrev=False,
        )
        self.show_all = "--help-all" in argv
        self.add = Adder(self, self.show_all)
        self.several_models = False
        self.groups: list[tuple[str, list[Flag]]] = []
        self.hidden: list[Flag] = []  # vLLM's flags without an equivalent in Quire
        self.add_argument("-h", "--help", action="help", help="show the common flags")
        self.add_argument(
            "--help-all", action="help", help="show all flags, and their environment variables"
        )

    def group(self, title: str) -> Adder:
        return Adder(self.add_argument_group(title), self.show_all)

    def add_flags(self, title: str, flags: Iterable[Flag], common: tuple[str, ...]) -> None:
        """Adds a group of flags. Those not named in `common` appear under --help-all only, which
        shows a group for each topic.
        """
        self.groups.append((title, list(flags)))
        shown: dict[str, Any] = {}
        for flag in self.groups[-1][1]:
            heading = f"{title}: {flag.topic}" if self.show_all and flag.topic else title
            if heading not in shown:
                shown[heading] = self.add_argument_group(heading)
            shown[heading].add_argument(
                *flag.options,
                dest=flag.name,
                default=argparse.SUPPRESS,
                **self._options(flag, flag.name in common),
            )

    def add_model(self, *, several: bool = False) -> None:
        """Adds the model as a positional argument. --model is an alias, as in vLLM. With `several`,
        further models may follow, and `parse` leaves all of them in `models`.
        """
        self.several_models = several
        model = next(flag for flag in engine_flags() if flag.name == "model")
        flag = replace(model, positional=True)
        self.groups.append(("model", [flag]))
        self.add_argument(
            "models" if several else "model",
            nargs="*" if several else "?",
            metavar="MODEL",
            default=[] if several else argparse.SUPPRESS,
            help=self._help(flag),
        )
        self.add_argument(
            "--model", dest=MODEL_OPTION, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )

    def add_sources(self) -> None:
        """Adds the flags of the sources. They come last, so that the help shows them after the
        command's own flags.
        """
        group = self.add_argument_group("settings")
        group.add_argument(
            "--config",
            metavar="FILE",
            help="YAML, TOML or JSON file with settings by name; flags and QUIRE_<NAME> variables "
            "win over it",
        )
        group.add_argument(
            "--print-config",
            action="store_true",
            help="print every setting with its source and exit",
        )
        if self.show_all:
            from .sources import OTHER_VARIABLES

            others = "; ".join(f"{name} ({what})" for name, what in OTHER_VARIABLES.items())
            self.epilog = (
                "In variables and files a switch is on or off, lists and objects are JSON in a "
                "variable (a list of one text may be that text). "
                f"Further variables: {others}; HF_HOME and HF_HUB_OFFLINE (of the hub client); "
                f"OMP_NUM_THREADS."
            )

    def parse(self, argv: list[str]) -> argparse.Namespace:
        """Returns the arguments and the settings of all sources as attributes. `settings` holds the
        source of each.

        With --print-config, prints them and raises SystemExit(0). Raises InvalidParameterError for
        an invalid file or variable.
        """
        if self.groups:
            self._add_vllm_flags()
            self.add_sources()
        args, unknown = self.parse_known_intermixed_args(self._with_dashes(argv))
        if unknown:
            self.error(self._unknown(unknown[0]))
        if isinstance(names := getattr(args, NAMES, None), list):
            self._take_names(args, names)
        if getattr(args, "models", []):
            args.model = args.models[0]
        if hasattr(args, MODEL_OPTION):
            if hasattr(args, "model"):
                self.error("MODEL and --model are the same; give one of them")
            args.model = getattr(args, MODEL_OPTION)
        if self.groups:
            self._add_settings(args)
        return args

    def _take_names(self, args: argparse.Namespace, names: list[str]) -> None:
        """Sets the names that clients use. The first word is the model's name. Further words are
        aliases, as in vLLM; if no model is given elsewhere, they are the models.
        """
        if not args.models and not hasattr(args, MODEL_OPTION):
            names, args.models = names[:1], names[1:]
        args.served_model_name, *aliases = names
        if aliases:
            args.model_aliases = [*getattr(args, "model_aliases", []), *aliases]

    def _add_vllm_flags(self) -> None:
        """Accepts the flags of a vLLM command line. Help and suggestions omit them."""
        known = {flag.name for _, group in self.groups for flag in group}
        if "dtype" not in known:
            return  # a command without an engine
        for flag in vllm_flags(of_server="port" in known):
            options = [word for word in flag.options if word not in self._option_string_actions]
            if flag.option in options:
                self.hidden.append(flag)
                self.add_argument(
                    *options,
                    dest=flag.name,
                    default=argparse.SUPPRESS,
                    **{**self._options(flag, False), "help": argparse.SUPPRESS},
                )

    def _with_dashes(self, argv: list[str]) -> list[str]:
        """Turns --max_model_len into --max-model-len, as vLLM does."""
        words = []
        for word in argv:
            option, equals, value = word.partition("=")
            dashed = option.replace("_", "-")
            is_known = option.startswith("--") and dashed in self._option_string_actions
            words.append(dashed + equals + value if is_known else word)
        return words

    def _add_settings(self, args: argparse.Namespace) -> None:
        from .sources import collect, render

        flags = {flag.name: flag for _, group in self.groups for flag in group}
        flags |= {flag.name: flag for flag in self.hidden}
        args.settings = collect(flags, given(args, flags.values()), args.config, self.prog)
        for name, setting in args.settings.items():
            setattr(args, name, setting.value)
        if args.print_config:
            print(render(self.groups, args.settings, self.prog), end="")
            self.exit()

    def _options(self, flag: Flag, is_common: bool) -> dict[str, Any]:
        """Returns the keyword arguments of add_argument for this flag's type."""
        plain = plain_type(flag.type)
        help_text = self._help(flag) if is_common or self.show_all else argparse.SUPPRESS
        if plain is bool:
            return {"action": argparse.BooleanOptionalAction, "help": help_text}
        if is_literal(flag.type):
            choices = get_args(plain)
            return {"type": _choice(flag, type(choices[0])), "choices": choices, "help": help_text}
        if flag.name in SEVERAL_WORDS or (flag.name == NAMES and self.several_models):
            return {"action": "extend", "nargs": "+", "metavar": "TEXT", "help": help_text}
        if plain == list[str]:
            return {"action": "append", "metavar": "TEXT", "help": help_text}
        metavar = {int: "N", float: "X", str: "TEXT", list[int]: "ID,ID"}.get(plain, "JSON")
        return {"type": _converter(flag), "metavar": metavar, "help": help_text}

    def _help(self, flag: Flag) -> str:
        default = flag.default
        if isinstance(default, bool):
            shown = "on" if default else "off"
        elif default in (None, [], {}) or "Default:" in flag.help:
            shown = ""
        else:
            shown = json.dumps(default) if isinstance(default, dict) else str(default)
        marks = [shown] * bool(shown) + [flag.variable] * self.show_all
        return (flag.help + (f" [{', '.join(marks)}]" if marks else "")).replace("%", "%%")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Replaces argparse's method, which takes -t for -tp, and -hf for -h with a value. A value
        may follow a letter at once only where the flag takes one (-O3).
        """
        found = super()._get_option_tuples(option_string)
        return [match for match in found if match[1] == option_string[:2] and match[0].nargs != 0]

    def _unknown(self, word: str) -> str:
        from ..arguments import other_engines

        option = word.split("=")[0]
        if (instead := other_engines.FLAGS.get(option)) is not None:
            if instead.startswith("--"):
                is_here = instead in self._option_string_actions
                instead = f"use {instead}" + ("" if is_here else f", which {self.prog} has not")
            return f"unknown flag {option}; {instead}"
        hidden = {flag.name for flag in self.hidden}
        known = [
            name.removeprefix("--")
            for action in self._actions
            for name in action.option_strings
            if name.startswith("--") and action.dest not in hidden
        ]
        near = closest(option.removeprefix("--"), known)
        kind = "flag" if option.startswith("-") else "argument"
        return f"unknown {kind} {option}; " + (
            f"did you mean --{near}?" if near else f"see {self.prog} --help-all"
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        """Replaces argparse's method, which ignores write errors."""
        (file or sys.stderr).write(message)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _choice(flag: Flag, kind: type) -> Callable[[str], Any]:
    """Returns, for argparse, a function that converts text to one of the choices and accepts vLLM's
    spelling, too.
    """

    def convert(text: str) -> Any:
        try:
            return kind(spelled(flag.name, text))
        except (TypeError, ValueError):
            message = f"invalid {kind.__name__} value: {text!r}"
            raise argparse.ArgumentTypeError(message) from None

    return convert


def _converter(flag: Flag) -> Callable[[str], Any]:
    """Returns, for argparse, a function that converts text to the field's value."""

    def convert(text: str) -> Any:
        try:
            return from_text(flag, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
