"""Messages from clients, and their normal form for a template."""

from __future__ import annotations

import pytest
from quire import InvalidParameterError
from quire.frontend.text.chat_messages import (
    further_instructions,
    normalize_messages,
    with_arguments_as_text,
    with_descriptions,
    with_empty_content,
    with_instruction_for_user,
    with_joined_users,
    with_one_call,
    with_one_instruction,
    with_result_names,
    with_results_as_json,
    with_short_ids,
    with_system_for_developer,
)

CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"a": [1, "é"]}'},
}
CONVERSATION = [
    {"role": "user", "content": "What?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
    {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
    },
]


def with_arguments(arguments) -> list[dict]:
    return [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    ]


def test_a_conversation_with_a_call() -> None:
    _, assistant, tool = normalize_messages(CONVERSATION)
    assert assistant["tool_calls"] == [
        {**CALL, "function": {"name": "f", "arguments": {"a": [1, "é"]}}}
    ]
    assert "content" not in assistant
    assert assistant["reasoning_content"] == assistant["reasoning"] == "Hm."
    assert tool == {"role": "tool", "tool_call_id": "call_1", "content": "one\ntwo"}
    assert CONVERSATION[1]["tool_calls"][0]["function"]["arguments"] == '{"a": [1, "é"]}', (
        "the client's own messages must stay as they are"
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
    ],
)
def test_arguments(arguments, expected) -> None:
    assert (
        normalize_messages(with_arguments(arguments))[0]["tool_calls"][0]["function"]["arguments"]
        == expected
    )


def test_an_empty_list_of_calls_is_no_key() -> None:
    for nothing in (None, []):
        assert normalize_messages(
            [{"role": "assistant", "content": "x", "tool_calls": nothing}]
        ) == [{"role": "assistant", "content": "x"}]


def test_keys_with_null_values_are_omitted() -> None:
    message = {"role": "assistant", "content": None, "name": None, "tool_calls": None}
    assert normalize_messages([message]) == [{"role": "assistant"}]


def test_both_names_of_reasoning() -> None:
    for key in ("reasoning", "reasoning_content"):
        (message,) = normalize_messages([{"role": "assistant", "content": "x", key: "Hm."}])
        assert message == {
            "role": "assistant",
            "content": "x",
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
        }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("x", "x"),
        ([], ""),
        (
            [
                {"type": "text", "text": "a"},
                {"type": "input_text", "text": "b"},
                "c",
                {"text": "d"},
            ],
            "a\nb\nc\nd",
        ),
        ([{"type": "refusal", "refusal": "No."}], "No."),
    ],
)
def test_content(content, text) -> None:
    assert normalize_messages([{"role": "user", "content": content}])[0]["content"] == text


@pytest.mark.parametrize(
    ("messages", "parameter", "problem"),
    [
        ([], "messages", "at least one message"),
        ("hello", "messages", "must be a list"),
        (["hello"], "messages[0]", "must be an object with a `role`"),
        ([{"content": "x"}], "messages[0].role", "must be a string, got None"),
        ([CONVERSATION[0], {"role": "user", "content": 5}], "messages[1].content", "got 5"),
        (
            [{"role": "user", "content": ["a", {"type": "image_url"}]}],
            "messages[0].content[1]",
            "this model reads text only",
        ),
        (
            [{"role": "user", "content": [{"type": ["x"]}]}],
            "messages[0].content[0]",
            "must be a part of type text",
        ),
        (
            [{"role": "assistant", "tool_calls": {"a": 1}}],
            "messages[0].tool_calls",
            "must be a list",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom"}]}],
            "messages[0].tool_calls[0].function",
            "`name` and `arguments`",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {}}]}],
            "messages[0].tool_calls[0].function.name",
            "must be a string",
        ),
        (with_arguments([1]), "messages[0].tool_calls[0].function.arguments", "must be JSON text"),
    ],
)
def test_errors_name_the_path(messages, parameter, problem) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        normalize_messages(messages)
    assert raised.value.parameter == parameter
    assert problem in raised.value.problem


def test_forms_that_some_templates_need() -> None:
    user, assistant, tool = normalize_messages(CONVERSATION)
    assert (
        with_arguments_as_text([assistant])[0]["tool_calls"][0]["function"]["arguments"]
        == '{"a": [1, "é"]}'
    )
    assert (
        with_arguments_as_text(normalize_messages(with_arguments("{broken")))[0]["tool_calls"][0][
            "function"
        ]["arguments"]
        == "{broken"
    )
    assert [m["content"] for m in with_empty_content([user, assistant])] == ["What?", ""]
    shortened = with_short_ids([assistant, tool])
    assert shortened[0]["tool_calls"][0]["id"] == shortened[1]["tool_call_id"] == "0000call1"
    assert [m["role"] for m in with_system_for_developer([{"role": "developer"}, user])] == [
        "system",
        "user",
    ]


def message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def test_instructions_become_one_or_belong_to_the_user() -> None:
    first, second = message("system", "Be brief."), message("developer", "In French.")
    user, answer = message("user", "What?"), message("assistant", "That.")
    assert list(further_instructions([first, second, user, answer, first, second])) == [
        ("leading", "developer"),
        ("late", "system"),
        ("late", "developer"),
    ]
    assert list(further_instructions([user, first])) == [("late", "system")]
    assert list(further_instructions([first, user])) == []
    one = message("system", "Be brief.\n\nIn French.")
    assert with_one_instruction([first, user, answer, second]) == [one, user, answer]
    assert with_one_instruction([user]) == [user]
    told = message("user", "Be brief.\n\nIn French.\n\nWhat?")
    assert with_instruction_for_user([first, user, answer, second, user]) == [told, answer, user]
    assert with_instruction_for_user([first, answer]) == [message("user", "Be brief."), answer]
    assert with_instruction_for_user([user, answer]) == [user, answer]


def test_neighbouring_messages_of_the_user_become_one() -> None:
    one, two, empty = (message("user", text) for text in ("One.", "Two.", ""))
    answer = message("assistant", "That.")
    both = message("user", "One.\n\nTwo.")
    assert with_joined_users([one, empty, two, answer, two]) == [both, answer, two]
    assert with_joined_users([one, answer, one]) == [one, answer, one]


def test_names_of_results_come_from_their_calls() -> None:
    _, assistant, tool = normalize_messages(CONVERSATION)
    orphan, named = {**tool, "tool_call_id": "call_2"}, {**tool, "name": "g"}
    found = with_result_names([assistant, tool, orphan, named])
    assert [m.get("name") for m in found] == [None, "f", None, "g"]


def test_an_added_description_is_the_last_key() -> None:
    bare = {"type": "function", "function": {"name": "f", "parameters": {}}}
    described = {"type": "function", "function": {"description": "D.", "name": "f"}}
    found = [list(tool["function"]) for tool in with_descriptions([bare, described])]
    assert found == [["name", "parameters", "description"], ["description", "name"]]


def test_one_call_per_message() -> None:
    def result(content: str, **fields: str) -> dict:
        return {"role": "tool", "content": content, **fields}

    user, f, g = {"role": "user", "content": "What?"}, {"id": "1"}, {"id": "2"}
    calling = {"role": "assistant", "content": "See.", "tool_calls": [f, g]}
    one, two = {**calling, "tool_calls": [f]}, {"role": "assistant", "tool_calls": [g]}
    a, b, c = (result(x, tool_call_id=i) for x, i in (("a", "1"), ("b", "2"), ("c", "3")))
    for messages, split in (
        ([user, calling, b, a, c, user], [user, one, a, two, b, c, user]),
        ([calling, b], [one, two, b]),
        ([calling], [one, two]),
        ([user, one, a], [user, one, a]),
    ):
        assert with_one_call(messages) == split
    f, g = {"function": {}}, {"function": {"name": "g"}}
    calling["tool_calls"] = [f, g]
    found = with_one_call([calling, result("a"), result("b"), calling])
    assert [m.get("tool_calls", m.get("content")) for m in found] == [[f], "a", [g], "b", [f], [g]]


def test_results_as_json() -> None:
    contents = ['{"a": 1}', "[1]", "5", "sunny", "{", "[" * 100_000]
    messages = [{"role": "tool", "content": content} for content in contents]
    found = [m["content"] for m in with_results_as_json([*messages, {"role": "user"}])[:-1]]
    assert found == [{"a": 1}, [1], *contents[2:]]
