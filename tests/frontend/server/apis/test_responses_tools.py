"""Tools of /v1/responses: namespaces, custom tools with their formats, and kinds that only
OpenAI's servers run.
"""

from typing import Any

import msgspec
import pytest
from quire.frontend.server.apis.responses_tools import (
    CheckedTools,
    ResponsesToolChoice,
    SentResponsesTool,
    checked_tools,
    custom_input,
)
from quire.frontend.server.http.errors import ApiError

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
SEARCH = {"type": "web_search", "external_web_access": False}
PATCH = {"type": "custom", "name": "patch", "description": "Patches."}


def checked(tools: list[dict[str, Any]] | None, choice: Any = None) -> CheckedTools:
    return checked_tools(
        msgspec.convert(tools, list[SentResponsesTool] | None),
        msgspec.convert(choice, str | ResponsesToolChoice | None),
    )


def names(found: CheckedTools) -> list[str]:
    return [tool["function"]["name"] for tool in found.functions or []]


def test_namespaces_are_flattened() -> None:
    spaces = [
        {"type": "namespace", "name": "team", "tools": [ADD, SEARCH]},
        {"type": "namespace", "name": "mcp__disk__", "tools": [ADD]},
    ]
    found = checked([ADD, *spaces])
    assert names(found) == ["add", "team__add", "mcp__disk__add"]
    assert found.ignored == ["tools[1].tools[1]"]
    origin = found.origin_of("mcp__disk__add")
    assert (origin.type, origin.name, origin.namespace) == ("function", "add", "mcp__disk__")
    assert found.origin_of("invented").name == "invented"


def test_kinds_that_a_server_would_run_are_left_out() -> None:
    found = checked([SEARCH, ADD, {"type": "image_generation"}])
    assert names(found) == ["add"] and found.ignored == ["tools[0]", "tools[2]"]
    assert checked([SEARCH]).functions is None and checked([]).functions == []


def test_keys_keep_the_order_of_the_client() -> None:
    schema = {"z": {}, "a": {}}
    tool = {"parameters": schema, "strict": True, "type": "function", "name": "f"}
    patch = {"format": {"type": "text"}, "type": "custom", "name": "p", "description": "Patches."}
    space = {"tools": [tool], "type": "namespace", "name": "team"}
    first, second, third = checked([tool, patch, space]).functions or []
    assert list(first["function"].items()) == [
        ("parameters", schema),
        ("strict", True),
        ("name", "f"),
    ]
    assert list(first["function"]["parameters"]) == ["z", "a"]
    assert list(second["function"]) == ["parameters", "name", "description"]
    assert list(third["function"]) == ["parameters", "strict", "name"]


def parameters_of(format: dict[str, Any] | None) -> tuple[dict[str, Any], bool, list[str]]:
    found = checked([PATCH | ({"format": format} if format else {})])
    [tool] = found.functions or []
    function = tool["function"]
    schema = function["parameters"]
    assert (schema["required"], schema["additionalProperties"]) == (["input"], False)
    return schema["properties"]["input"], function.get("strict", False), found.ignored


def test_custom_tools_take_one_text() -> None:
    assert parameters_of(None) == ({"type": "string"}, False, [])
    assert parameters_of({"type": "text"}) == ({"type": "string"}, False, [])


def test_grammars_of_custom_tools_constrain_the_text() -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    assert parameters_of(regex) == ({"type": "string", "pattern": "^(?:a|b)$"}, True, [])
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" LF\n%import common.LF'}
    text, is_strict, ignored = parameters_of(lark)
    assert is_strict and not ignored and lark["definition"] in text["description"]
    assert text["pattern"].startswith("^(?:")


def test_a_recursive_grammar_is_only_described() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "(" start ")" | "x"'}
    text, is_strict, ignored = parameters_of(lark)
    assert (is_strict, ignored) == (False, ["tools[0].format"]) and "pattern" not in text
    assert lark["definition"] in text["description"]


def test_a_choice_names_a_tool_with_or_without_its_namespace() -> None:
    tools = [{"type": "namespace", "name": "team", "tools": [ADD, PATCH]}, ADD | {"name": "sub"}]
    assert checked(tools, {"type": "custom", "name": "patch"}).choice == {"name": "team__patch"}
    assert checked(tools, {"type": "function", "name": "team__add"}).choice == {"name": "team__add"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [ADD | {"parameters": None}]}
    assert names(checked(tools, allowed)) == ["team__add"]


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{"type": "namespace", "tools": [ADD]}], None, "tools[0].name"),
        ([{"type": "namespace", "name": "a", "tools": [ADD, ADD]}], None, "tools[0].tools[1].name"),
        ([PATCH | {"format": {"type": "json"}}], None, "tools[0].format.type"),
        ([PATCH | {"format": {"type": "grammar"}}], None, "tools[0].format.definition"),
        (
            [PATCH | {"format": {"type": "grammar", "syntax": "ebnf", "definition": "a"}}],
            None,
            "tools[0].format.syntax",
        ),
        ([SEARCH], "required", "tool_choice"),
        ([ADD, SEARCH], {"type": "web_search"}, "tool_choice.type"),
    ],
)
def test_refusals_name_the_field(tools: list[dict[str, Any]], choice: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        checked(tools, choice)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        ('{"input": "a', '{"input": "a'),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
    ],
)
def test_the_text_of_a_custom_call(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text
