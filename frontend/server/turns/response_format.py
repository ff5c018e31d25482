"""Constraints on the output: OpenAI's response_format, vLLM's structured_outputs and its older
guided_* fields as StructuredOutputsParams, and the options of JSON.

Must not know: grammars (the engine compiles and validates them), prompts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ....ipc.params import StructuredOutputsParams
from ..http.errors import invalid, missing, renaming, unsupported

if TYPE_CHECKING:
    from ..config import ServerConfig

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # of schemas and functions
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
JSON_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's extension: exactly one of the first five fields, unless another field of the body
    constrains the output; then only the others.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class ConstraintBody(msgspec.Struct, kw_only=True):
    """The fields of a body that constrain the output. None: the field was not sent."""

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    # The names guided_* are deprecated ones of the parts of structured_outputs.
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    # These apply to every field that requests JSON.
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


def structured_outputs_of(body: ConstraintBody) -> StructuredOutputsParams | None:
    """Returns a body's constraint, which may have one of three forms, without options of JSON."""
    guided = {name: kind for name, kind in GUIDED.items() if getattr(body, name) is not None}
    ways: dict[str, Any] = {
        "response_format": response_format(body.response_format),
        "structured_outputs": kinds_of(body.structured_outputs),
        next(iter(guided), "guided"): {kind: getattr(body, name) for name, kind in guided.items()}
        or None,
    }
    given = [name for name, wanted in ways.items() if wanted is not None]
    if len(given) > 1:
        raise invalid(given[1], f"Give '{given[0]}' or '{given[1]}', not both.")
    if not given and body.structured_outputs is None:
        return None
    wanted = ways[given[0]] if given else {}
    if isinstance(wanted, StructuredOutputsParams):
        return wanted
    with renaming({f"structured_outputs.{kind}": name for name, kind in guided.items()}):
        return StructuredOutputsParams(**wanted)


def kinds_of(stated: StructuredOutputs | None) -> dict[str, Any] | None:
    """Returns the constraint in `stated`, without its options of JSON."""
    if stated is None:
        return None
    fields = msgspec.structs.asdict(stated)
    return {n: v for n, v in fields.items() if v is not None and n not in JSON_OPTIONS} or None


@dataclass(frozen=True, slots=True)
class JsonOptions:
    """How JSON is written, in an answer and in its tool calls.

    is_compact means without whitespace. With lists_properties, objects of schemas have only the
    properties that are listed. whitespace_pattern is that of an answer; None stands for the
    engine's.
    """

    is_compact: bool = False
    lists_properties: bool = True
    whitespace_pattern: str | None = None

    def applied_to(self, params: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """Returns `params` with these options, whichever field of the body the constraint comes
        from.
        """
        if params is None or (params.json is None and not params.json_object):
            return params
        return msgspec.structs.replace(
            params,
            whitespace_pattern=self.whitespace_pattern,
            disable_any_whitespace=self.is_compact,
            disable_additional_properties=self.lists_properties,
        )


def json_options(body: Any, config: ServerConfig) -> JsonOptions:
    """Returns the options of a body of any API: vLLM's `structured_outputs` first, then fields of
    its own, then the server's.
    """
    stated = getattr(body, "structured_outputs", None)
    holders = (stated, body, config)

    def first(name: str) -> Any:
        found = (getattr(holder, name, None) for holder in holders)
        return next((value for value in found if value is not None), None)

    pattern = getattr(stated, "whitespace_pattern", None)
    if pattern is None:
        pattern = getattr(body, "guided_whitespace_pattern", None)
    return JsonOptions(
        first("disable_any_whitespace"), first("disable_additional_properties"), pattern
    )


def response_format(wanted: dict[str, Any] | None) -> StructuredOutputsParams | None:
    """Reads OpenAI's `response_format`. A schema is enforced whether or not it is `strict`."""
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
    """Returns the schema of OpenAI's {name, schema, strict, description}."""
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
