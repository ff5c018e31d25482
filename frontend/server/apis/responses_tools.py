"""The tools of a body of /v1/responses, as functions that chat templates know, and the calls of
these functions as items.

Must not know: the other fields of a body, templates, HTTP.

OpenAI's API has kinds of tools besides functions. A `namespace` groups functions: they are
flattened, and the model calls NAMESPACE__NAME. A `custom` tool takes free text: the model calls a
function whose one argument is that text. All other kinds are run by OpenAI's servers: they are left
out, and noted as ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from ..http.bodies import checked, sent_as
from ..http.errors import invalid, missing, unsupported
from .lark_regex import LarkError, lark_regex

INPUT = "input"  # the argument of a custom tool's function
SEPARATOR = "__"  # between a namespace and a name


class CustomFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`type`: text, or grammar with a `definition` in the `syntax` lark or regex."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class NamespacedTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Fields that a type does not have are None."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None


class ResponsesTool(NamespacedTool, kw_only=True, omit_defaults=True):
    """`tools`: of a namespace."""

    tools: list[NamespacedTool] | None = None


SentResponsesTool = Annotated[dict[str, Any], sent_as(ResponsesTool)]


class ResponsesToolRef(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None


class ResponsesToolChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[ResponsesToolRef] | None = None


@dataclass(frozen=True, slots=True)
class ToolOrigin:
    """The tool of the body that a function stands for."""

    type: str
    name: str
    namespace: str | None = None


@dataclass(slots=True)
class CheckedTools:
    """`functions`: in the form of OpenAI's chat API; None if the body has no tools. `choice`:
    "auto", "none", "required" or {"name": ...}. `origins`: by the name that the model calls.
    `ignored`: the fields without effect.
    """

    functions: list[dict[str, Any]] | None = None
    choice: Any = "auto"
    origins: dict[str, ToolOrigin] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def origin_of(self, name: str) -> ToolOrigin:
        """A model may call a function that does not exist."""
        return self.origins.get(name) or ToolOrigin("function", name)


def called_name(name: str, namespace: str | None) -> str:
    """Returns the name under which the model knows a tool."""
    return name if not namespace else namespace.removesuffix(SEPARATOR) + SEPARATOR + name


def checked_tools(
    tools: list[SentResponsesTool] | None, choice: str | ResponsesToolChoice | None
) -> CheckedTools:
    """Raises ApiError with the path of the invalid field."""
    found = CheckedTools(None if tools is None else [])
    functions: dict[str, dict[str, Any]] = {}
    for where, sent, namespace in _flattened(tools or [], found.ignored):
        tool = checked(sent, NamespacedTool, where)
        if not tool.name:
            raise missing(f"{where}.name")
        name = called_name(tool.name, namespace)
        if name in functions:
            raise invalid(f"{where}.name", f"'{where}.name': two tools are called {name!r:.60}.")
        found.origins[name] = ToolOrigin(tool.type, tool.name, namespace)
        functions[name] = _function(sent, tool, name, where, found.ignored)
    if isinstance(choice, ResponsesToolChoice):
        allowed, found.choice = _chosen(choice, found.origins)
        functions = {name: functions[name] for name in functions if name in allowed}
    elif choice not in (None, "auto", "none", "required"):
        raise invalid(
            "tool_choice",
            f"'tool_choice' must be none, auto, required or an object that names a function, got "
            f"{choice!r:.40}.",
        )
    elif choice == "required" and not functions:
        raise invalid("tool_choice", "'tool_choice' can be required only with 'tools'.")
    else:
        found.choice = choice or "auto"
    # A template writes about tools even for an empty list.
    has_only_ignored = bool(tools) and not found.origins
    found.functions = None if tools is None or has_only_ignored else list(functions.values())
    return found


def _flattened(
    tools: list[SentResponsesTool], ignored: list[str]
) -> Iterator[tuple[str, dict[str, Any], str | None]]:
    """Yields the path of each tool that the client runs, the tool as it was sent, and its
    namespace.
    """
    for i, sent in enumerate(tools):
        tool = checked(sent, ResponsesTool, f"tools[{i}]")
        if tool.type == "namespace":
            if not tool.name:
                raise missing(f"tools[{i}].name")
            for j, inner in enumerate(sent.get("tools") or []):
                where = f"tools[{i}].tools[{j}]"
                if inner["type"] in ("function", "custom"):
                    yield where, inner, tool.name
                else:
                    ignored.append(where)
        elif tool.type in ("function", "custom"):
            yield f"tools[{i}]", sent, None
        else:
            ignored.append(f"tools[{i}]")


def _function(
    sent: dict[str, Any], tool: NamespacedTool, name: str, where: str, ignored: list[str]
) -> dict[str, Any]:
    """Converts a function. It keeps the order of the client's keys, since a template writes them.
    `sent` is the tool as it was sent, and `name` is what the model calls.
    """
    parameters, is_strict = tool.parameters or {"type": "object"}, bool(tool.strict)
    if tool.type == "custom":
        parameters, is_strict = _custom_parameters(tool.format, f"{where}.format", ignored)
    known = {"description": tool.description, "parameters": parameters, "strict": is_strict}
    known = {"name": name} | {key: value for key, value in known.items() if value}
    keys = ["parameters" if key == "format" else key for key in sent]
    ordered = {key: known[key] for key in keys if key in known}
    return {"type": "function", "function": ordered | known}


def _custom_parameters(
    format: CustomFormat | None, where: str, ignored: list[str]
) -> tuple[dict[str, Any], bool]:
    """Returns the schema of a custom tool's function, and whether calls are constrained to it."""
    text: dict[str, Any] = {"type": "string"}
    if format is not None and format.type == "grammar":
        if format.definition is None:
            raise missing(f"{where}.definition")
        if format.syntax == "regex":
            text["pattern"] = f"^(?:{format.definition})$"
        elif format.syntax == "lark":
            text["description"] = f"Text in this Lark grammar:\n{format.definition}"
            try:
                text["pattern"] = f"^(?:{lark_regex(format.definition)})$"
            except LarkError:
                ignored.append(where)
        else:
            raise unsupported(
                f"{where}.syntax",
                f"'{where}.syntax' must be lark or regex, got {format.syntax!r:.40}.",
            )
    elif format is not None and format.type != "text":
        raise unsupported(
            f"{where}.type", f"'{where}.type' must be text or grammar, got {format.type!r:.40}."
        )
    schema = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return schema, "pattern" in text


def _chosen(choice: ResponsesToolChoice, origins: dict[str, ToolOrigin]) -> tuple[set[str], Any]:
    """Returns the functions that the model may call, and the choice among them."""
    if choice.type in ("function", "custom"):
        if not (names := _called(choice.name, origins)):
            raise invalid(
                "tool_choice.name", "'tool_choice.name' must be the name of one of 'tools'."
            )
        return set(origins), {"name": names[0]}
    if choice.type != "allowed_tools":
        raise unsupported(
            "tool_choice.type",
            f"'tool_choice.type' must be function, custom or allowed_tools, got "
            f"{choice.type!r:.40}.",
        )
    if choice.mode not in ("auto", "required"):
        raise invalid("tool_choice.mode", "'tool_choice.mode' must be auto or required.")
    allowed = [_called(ref.name, origins) for ref in choice.tools or []]
    if not allowed or not all(allowed):
        raise invalid(
            "tool_choice.tools",
            "'tool_choice.tools' must name at least one function of 'tools'.",
        )
    return {name for names in allowed for name in names}, choice.mode


def _called(name: str | None, origins: dict[str, ToolOrigin]) -> list[str]:
    """Returns the model's names for the tool `name`, which may come without its namespace."""
    return [key for key, origin in origins.items() if name in (key, origin.name)]


def shown_tool(sent: SentResponsesTool) -> dict[str, Any]:
    """Returns a tool of the body, which `checked_tools` accepted, as a response shows it."""
    tool = msgspec.convert(sent, ResponsesTool)
    shown = msgspec.to_builtins(tool)
    return shown | {"strict": bool(tool.strict)} if tool.type == "function" else shown


def custom_input(arguments: str) -> str:
    """Returns the free text of a custom tool's call. A call that does not follow the schema, or was
    cut, is returned as the model wrote it.
    """
    try:
        found = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
