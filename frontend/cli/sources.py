"""The sources of a command's settings: flags override QUIRE_* variables, these override a file, and
that overrides defaults. The module also prints the settings with their sources.

Must not know: argparse, the effect of any setting.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ipc.checks import closest
from ...ipc.errors import InvalidParameterError
from .flags import Flag, all_flag_names
from .values import from_plain, from_text

PREFIX = "QUIRE_"
CONFIG_VARIABLE = "QUIRE_CONFIG"
# Variables that are not settings of a command.
OTHER_VARIABLES = {
    CONFIG_VARIABLE: "file with settings, as --config",
    "QUIRE_TRACEBACK": "1: an internal error shows where it happened",
    "QUIRE_NATIVE": "0: no native kernels on a CPU, or the path of another library with them",
}
# Kubernetes sets variables in every container for each service of its namespace. A service named
# "quire" must not set the port.
KUBERNETES = re.compile(r"QUIRE_(?:.*_)?(?:SERVICE_HOST|SERVICE_PORT(?:_.*)?|PORT_\d+_.*)")
# Replaces a secret in the output of --print-config. Reading it back is an error, because the server
# would run without its keys.
HIDDEN = "<hidden>"


@dataclass(frozen=True)
class Setting:
    value: Any
    source: str  # "flag --port", "environment QUIRE_PORT" or "file quire.yaml"


def collect(
    flags: Mapping[str, Flag], command_line: Mapping[str, Any], file: str | None, command: str
) -> dict[str, Setting]:
    """Returns every setting that was given, by name, from the source with the highest priority.

    Raises InvalidParameterError naming the variable, or the file and the key.
    """
    origin = "--config" if file is not None else CONFIG_VARIABLE
    file = file if file is not None else os.environ.get(CONFIG_VARIABLE) or None
    settings = read_file(flags, file, origin, command) if file is not None else {}
    settings |= read_environment(flags, os.environ)
    for name, value in command_line.items():
        settings[name] = Setting(
            value, "the command line" if flags[name].positional else f"flag {flags[name].option}"
        )
        _check(flags[name], value)
    for name, setting in settings.items():
        if setting.value == HIDDEN and flags[name].is_secret:
            raise InvalidParameterError(
                origin,
                f"{file}: {name} is not written there but {HIDDEN}, as --print-config prints it; "
                f"give it by {flags[name].option} or "
                f"{PREFIX}{name.upper()}, or take it out",
            )
    return settings


def _check(flag: Flag, value: Any) -> None:
    """Checks values that argparse assembled from several flags, which no check has seen as a
    whole.
    """
    try:
        if flag.check is not None:
            flag.check(value)
    except ValueError as error:
        raise InvalidParameterError(flag.option, str(error)) from None


@contextlib.contextmanager
def naming_sources(settings: Mapping[str, Setting]) -> Iterator[None]:
    """Wraps a command's use of its settings: an error about a setting that is not from the command
    line names its source.
    """
    try:
        yield
    except InvalidParameterError as error:
        setting = settings.get(error.parameter)
        if setting is not None and setting.source.startswith(("environment ", "file ")):
            error.add_source(setting.source)
        raise


# ------------------------------------------------------------ environment


def read_environment(flags: Mapping[str, Flag], environ: Mapping[str, str]) -> dict[str, Setting]:
    """Reads QUIRE_<NAME> of this command's settings. A variable for another command is ignored; an
    unknown one causes a warning.
    """
    settings = {}
    for variable in sorted(name for name in environ if name.startswith(PREFIX)):
        name, text = variable.removeprefix(PREFIX).lower(), environ[variable]
        if (
            variable in OTHER_VARIABLES
            or KUBERNETES.fullmatch(variable)
            or re.match(r"(tcp|udp|sctp)://", text)
        ):
            continue
        if name not in flags:
            _warn_of_unknown(variable, {*flags, *all_flag_names()})
            continue
        # compose files write "not set" like this; an empty key is an error and does not mean no key
        if not text and not flags[name].is_secret:
            continue
        try:
            settings[name] = Setting(from_text(flags[name], text), f"environment {variable}")
        except ValueError as error:
            raise InvalidParameterError(variable, str(error)) from None
    return settings


def _warn_of_unknown(variable: str, names: set[str]) -> None:
    if variable.removeprefix(PREFIX).lower() in names:
        return
    others = [name.removeprefix(PREFIX) for name in OTHER_VARIABLES if name.startswith(PREFIX)]
    near = closest(variable.removeprefix(PREFIX), [*others, *map(str.upper, sorted(names))])
    advice = f"did you mean {PREFIX}{near}?" if near else "it is ignored"
    print(f"quire: the variable {variable} matches no setting; {advice}", file=sys.stderr)


# ------------------------------------------------------------ files


def read_file(
    flags: Mapping[str, Flag], file: str, origin: str, command: str
) -> dict[str, Setting]:
    """Reads a YAML, TOML or JSON file (by its suffix) of names and values.

    Every key must be one of this command's settings.
    """
    values = _values(flags, _parse(Path(file), origin), file, origin, command)
    return {name: Setting(value, f"file {file}") for name, value in values.items()}


def read_sections(
    flags: Mapping[str, Flag], file: str, origin: str, command: str
) -> dict[str, dict[str, Any]]:
    """Reads a file of sections, each with names and values."""
    sections = {}
    for title, section in _parse(Path(file), origin).items():
        if not isinstance(section, dict):
            problem = f"{file}: {title} must contain names and values, not {section!r:.40}"
            raise InvalidParameterError(origin, problem)
        sections[str(title)] = _values(flags, section, file, origin, command)
    return sections


def _values(
    flags: Mapping[str, Flag], parsed: dict[Any, Any], file: str, origin: str, command: str
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in _with_aliases(parsed, flags).items():
        name = key.replace("-", "_") if isinstance(key, str) else key
        if name not in flags:
            raise InvalidParameterError(origin, f"{file}: {_unknown(name, flags, command)}")
        if name in values:
            raise InvalidParameterError(origin, f"{file}: {name} occurs twice")
        try:
            values[name] = (
                value
                if flags[name].is_secret and value == HIDDEN
                else from_plain(flags[name], value)
            )
        except ValueError as error:
            raise InvalidParameterError(origin, f"{file}: {name} {error}") from None
    return values


def _with_aliases(parsed: dict[Any, Any], flags: Mapping[str, Flag]) -> dict[Any, Any]:
    """Splits vLLM's list of names into a name and aliases, where a command has those."""
    key = next((key for key in ("served_model_name", "served-model-name") if key in parsed), None)
    names = parsed.get(key)
    if not isinstance(names, list) or not names or "model_aliases" not in flags:
        return parsed
    aliases = [*names[1:], *parsed.get("model_aliases", [])]
    return {**parsed, key: names[0], "model_aliases": aliases}


def _unknown(name: Any, flags: Mapping[str, Flag], command: str) -> str:
    if name in all_flag_names():
        return f"{name} is not a setting of {command}"
    near = closest(str(name), flags)
    return f"there is no setting {name!r}; " + (
        f"did you mean {near}?" if near else f"{command} --help-all lists all"
    )


def _parse(path: Path, origin: str) -> dict[Any, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidParameterError(origin, f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidParameterError(origin, f"{path} is not UTF-8 (byte {error.start})") from None
    if path.suffix not in PARSERS:
        raise InvalidParameterError(origin, f"{path} must end in .yaml, .yml, .json or .toml")
    kind, parse = PARSERS[path.suffix]
    try:
        value = parse(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError(origin, f"{path} is not {kind}: {error}") from None
    if value is None:  # only comments
        return {}
    if not isinstance(value, dict):
        raise InvalidParameterError(
            origin,
            f"{path} must contain names and values (dtype: float32), not a {type(value).__name__}",
        )
    return value


def _parse_toml(text: str) -> Any:
    import tomllib

    return tomllib.loads(text)


def _parse_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_without_repetition)


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Rejects duplicate keys, of which the JSON parser would silently keep the last."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{max(names, key=names.count)} occurs twice")
    return dict(pairs)


def _parse_yaml(text: str) -> Any:
    from . import yaml_text

    return yaml_text.load(text)


PARSERS = {
    ".yaml": ("YAML", _parse_yaml),
    ".yml": ("YAML", _parse_yaml),
    ".json": ("JSON", _parse_json),
    ".toml": ("TOML", _parse_toml),
}


# ------------------------------------------------------------ printing


def render(
    groups: Iterable[tuple[str, list[Flag]]], settings: Mapping[str, Setting], command: str
) -> str:
    """Returns all settings as YAML with their sources as comments.

    As a file for --config, it produces the same settings. A default that is determined later (by
    the model, or at random) is written as a comment, because a fixed value would change its
    meaning.
    """
    lines = [
        f"# {command}: the settings and their sources; {command} --config FILE reads this file"
    ]
    for title, flags in groups:
        lines += ["", f"# {title}"]
        for flag in flags:
            setting = settings.get(flag.name)
            value = setting.value if setting else flag.default
            source = setting.source if setting else "default"
            if flag.is_secret and value:
                how_many = f"{len(value)} given, " if isinstance(value, list) else ""
                value, source = HIDDEN, f"{how_many}{source}; never printed"
            comment = "# " if setting is None and flag.decided_later else ""
            lines.append(f"{f'{comment}{flag.name}: {_yaml(value)}':<48} # {source}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    """Returns one value as it may follow a key."""
    import msgspec

    from . import yaml_text

    if isinstance(value, msgspec.Struct):
        value = {
            name: item
            for name, item in msgspec.structs.asdict(value).items()
            if item not in (None, False)
        }
    return yaml_text.dump(value)
