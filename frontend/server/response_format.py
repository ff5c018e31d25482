"""What an answer must be: OpenAI's response_format, vLLM's structured_outputs and its older
guided_*, as StructuredOutputsParams.

Must not know: grammars (the engine compiles them and says what is wrong), prompts.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.params import StructuredOutputsParams
from .http.errors import invalid, missing, refused, unsupported

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # of schemas and of functions
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_whitespace_pattern": "whitespace_pattern",
}


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's extension: exactly one of the first five."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None


def structured_outputs_of(body: Any) -> StructuredOutputsParams | None:
    """Of a SamplingBody, which may ask in one of three ways."""
    guided = {name: kind for name, kind in GUIDED.items() if getattr(body, name) is not None}
    ways = {
        "response_format": response_format(body.response_format),
        "structured_outputs": body.structured_outputs,
    }
    ways |= {
        next(iter(guided), "guided"): {kind: getattr(body, name) for name, kind in guided.items()}
        or None
    }
    given = [name for name, wanted in ways.items() if wanted is not None]
    if len(given) > 1:
        raise invalid(given[1], f"Give '{given[0]}' or '{given[1]}', not both.")
    if not given:
        return None
    wanted = ways[given[0]]
    if isinstance(wanted, StructuredOutputsParams):
        return wanted
    fields = msgspec.structs.asdict(wanted) if isinstance(wanted, StructuredOutputs) else wanted
    try:
        return StructuredOutputsParams(
            **{name: value for name, value in fields.items() if value is not None}
        )
    except InvalidParameterError as error:
        own = {f"structured_outputs.{kind}": name for name, kind in guided.items()}
        raise refused(error.parameter, error.problem, own) from None


def response_format(wanted: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """OpenAI's `response_format` object. A schema holds whether or not it is `strict`."""
    kind = None if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind is None:
        raise missing("response_format.type")
    if kind != "json_schema":
        shown = msgspec.json.encode(kind).decode()
        raise unsupported(
            "response_format.type",
            f"'response_format.type' must be text, json_object or json_schema, got {shown:.60}.",
        )
    return StructuredOutputsParams(
        json=checked_schema(wanted.get("json_schema"), "response_format.json_schema")
    )


def checked_schema(stated: Any, where: str) -> dict[str, Any]:
    """The schema of OpenAI's {name, schema, strict, description}."""
    if stated is None:
        raise missing(where)
    if not isinstance(stated, dict):
        raise invalid(where, f"'{where}' must be an object.", "invalid_type")
    check_name(stated.get("name"), f"{where}.name")
    if not isinstance(stated.get("strict"), bool | None):
        raise invalid(f"{where}.strict", f"'{where}.strict' must be true or false.", "invalid_type")
    schema = stated.get("schema")
    if schema is None:
        raise missing(f"{where}.schema")
    if not isinstance(schema, dict):
        raise invalid(f"{where}.schema", f"'{where}.schema' must be an object.", "invalid_type")
    return schema


def check_name(name: Any, where: str) -> str:
    if name is None:
        raise missing(where)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(where, f"'{where}' must be 1 to 64 letters, digits, underscores or dashes.")
    return name
