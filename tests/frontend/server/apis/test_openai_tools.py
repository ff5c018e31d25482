"""Tools and tool_choice: every form of the choice, and the path of an error."""

from typing import Any

import msgspec
import pytest
from quire.frontend.server.apis.openai_tools import SentTool, ToolChoice, checked_tools
from quire.frontend.server.http.errors import ApiError

ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
SUB = {"type": "function", "function": {"name": "sub"}}


def checked(tools: Any, choice: Any) -> tuple[Any, Any]:
    return checked_tools(
        msgspec.convert(tools, list[SentTool] | None),
        msgspec.convert(choice, str | ToolChoice | None),
    )


def allowed(mode: str, *names: str) -> dict:
    return {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": mode,
            "tools": [{"type": "function", "function": {"name": n}} for n in names],
        },
    }


@pytest.mark.parametrize(
    ("tools", "choice", "kept", "wanted"),
    [
        (None, None, None, "none"),
        ([], "auto", [], "auto"),
        ([ADD, SUB], None, [ADD, SUB], "auto"),
        ([ADD], "none", [ADD], "none"),
        ([ADD], "required", [ADD], "required"),
        (
            [ADD, SUB],
            {"type": "function", "function": {"name": "sub"}},
            [ADD, SUB],
            {"name": "sub"},
        ),
        ([ADD, SUB], allowed("required", "sub"), [SUB], "required"),
        ([ADD, SUB], allowed("auto", "add"), [ADD], "auto"),
    ],
)
def test_every_form_of_the_choice(tools: Any, choice: Any, kept: Any, wanted: Any) -> None:
    assert checked(tools, choice) == (kept, wanted)


@pytest.mark.parametrize(
    ("tools", "choice", "param", "code"),
    [
        ([ADD], "always", "tool_choice", "invalid_value"),
        (None, "required", "tool_choice", "invalid_value"),
        (
            [ADD],
            {"type": "function", "function": {"name": "mul"}},
            "tool_choice.function.name",
            "invalid_value",
        ),
        ([ADD], {"type": "function"}, "tool_choice.function", "missing_required_parameter"),
        (
            [ADD],
            {"type": "custom", "custom": {"name": "x"}},
            "tool_choice.type",
            "unsupported_value",
        ),
        (
            [ADD],
            {"type": "allowed_tools"},
            "tool_choice.allowed_tools",
            "missing_required_parameter",
        ),
        ([ADD], allowed("auto"), "tool_choice.allowed_tools.tools", "empty_array"),
        (
            [ADD],
            allowed("auto", "mul"),
            "tool_choice.allowed_tools.tools[0].function.name",
            "invalid_value",
        ),
        ([ADD, ADD], None, "tools[1].function.name", "invalid_value"),
        ([{}], None, "tools[0].type", "missing_required_parameter"),
        ([SUB, {"type": 5}], None, "tools[1].type", "invalid_type"),
        (
            [{"type": "function", "function": {"name": 5}}],
            None,
            "tools[0].function.name",
            "invalid_type",
        ),
        ([{"type": "function"}], None, "tools[0].function", "missing_required_parameter"),
        ([{"type": "custom", "custom": {"name": "x"}}], None, "tools[0].type", "unsupported_value"),
        (
            [{"type": "function", "function": {"name": ""}}],
            None,
            "tools[0].function.name",
            "invalid_value",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}],
            None,
            "tools[0].function.parameters",
            "invalid_function_parameters",
        ),
    ],
)
def test_errors_name_the_path(tools: Any, choice: Any, param: str, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        checked(tools, choice)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)


def test_strict_stays_with_its_tool() -> None:
    strict = {"type": "function", "function": ADD["function"] | {"strict": True}}
    assert checked([strict], None) == ([strict], "auto")


def test_keys_keep_the_order_of_the_client() -> None:
    function = {"parameters": {"z": 1, "a": 2}, "description": None, "name": "f"}
    [tool], _ = checked([{"function": function, "custom": None, "type": "function"}], None)
    assert list(tool) == ["function", "type"]
    assert list(tool["function"]) == ["parameters", "name"]
    assert list(tool["function"]["parameters"]) == ["z", "a"]
