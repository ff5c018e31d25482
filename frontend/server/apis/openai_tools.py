"""Checks tools and tool_choice of OpenAI's chat API and converts them to one form.

Must not know: how tools are presented to a model, or how a model calls them
(frontend/answer_format).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..http.bodies import checked, known_fields, sent_as
from ..http.errors import invalid, missing, unsupported
from ..turns.response_format import check_name


class FunctionTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """`custom`: OpenAI's tools with free-text input; rejected."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function"]})]
    function: FunctionTool | None = None
    custom: dict[str, Any] | None = None


SentTool = Annotated[dict[str, Any], sent_as(Tool)]


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class AllowedTool(msgspec.Struct, kw_only=True):
    function: NamedFunction
    type: str = "function"


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ToolChoice(msgspec.Struct, kw_only=True):
    """{"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools",
    "allowed_tools": {"mode": ..., "tools": [...]}}.
    """

    type: Annotated[str, Meta(extra_json_schema={"enum": ["function", "allowed_tools"]})]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None
    custom: dict[str, Any] | None = None


SentToolChoice = str | ToolChoice | None


def checked_tools(
    tools: list[SentTool] | None, choice: SentToolChoice
) -> tuple[list[dict[str, Any]] | None, Any]:
    """Returns the tools that the model may use, and "auto", "none", "required" or {"name": ...}.

    Raises ApiError with the path of the invalid field.
    """
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or [])]
    names: set[str] = set()
    for i, function in enumerate(functions):
        if (name := function["function"]["name"]) in names:
            raise invalid(f"tools[{i}].function.name", f"Two tools are called {name!r}.")
        names.add(name)
    wanted = _choice(choice, names)
    if isinstance(choice, ToolChoice) and choice.allowed_tools is not None:
        allowed = {tool.function.name for tool in choice.allowed_tools.tools}
        functions = [function for function in functions if function["function"]["name"] in allowed]
    return None if tools is None else functions, wanted


def _function(sent: SentTool, where: str) -> dict[str, Any]:
    """Converts a function. It keeps the client's order of keys, since a template writes them."""
    tool = checked(sent, Tool, where)
    if tool.type != "function":
        raise unsupported(
            f"{where}.type",
            f"'{where}.type' must be \"function\", got {tool.type!r:.40}: other tools are not "
            f"supported.",
        )
    if tool.function is None:
        raise missing(f"{where}.function")
    check_name(tool.function.name, f"{where}.function.name")
    schema = tool.function.parameters
    if schema and schema.get("type", "object") != "object":
        path = f"{where}.function.parameters"
        raise invalid(
            path, f"'{path}' must be the JSON schema of an object.", "invalid_function_parameters"
        )
    return known_fields(sent, Tool) | {"function": known_fields(sent["function"], FunctionTool)}


def _choice(choice: SentToolChoice, names: set[str]) -> Any:
    if choice is None:
        return "auto" if names else "none"
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise invalid(
                "tool_choice",
                f"'tool_choice' must be none, auto, required or an object that names a function, "
                f"got {choice!r:.40}.",
            )
        if choice == "required" and not names:
            raise invalid(
                "tool_choice", "'tool_choice' is only allowed when 'tools' are specified."
            )
        return choice
    if choice.type == "allowed_tools":
        if choice.allowed_tools is None:
            raise missing("tool_choice.allowed_tools")
        for i, tool in enumerate(choice.allowed_tools.tools):
            _require_known(
                tool.function.name, names, f"tool_choice.allowed_tools.tools[{i}].function.name"
            )
        if not choice.allowed_tools.tools:
            raise invalid(
                "tool_choice.allowed_tools.tools",
                "'tool_choice.allowed_tools.tools' must not be empty.",
                "empty_array",
            )
        return choice.allowed_tools.mode
    if choice.type != "function":
        raise unsupported(
            "tool_choice.type",
            f"'tool_choice.type' must be function or allowed_tools, got {choice.type!r:.40}.",
        )
    if choice.function is None:
        raise missing("tool_choice.function")
    _require_known(choice.function.name, names, "tool_choice.function.name")
    return {"name": choice.function.name}


def _require_known(name: str, names: set[str], where: str) -> None:
    if name not in names:
        raise invalid(where, f"'{where}' is {name!r:.60}, which is not one of 'tools'.")
