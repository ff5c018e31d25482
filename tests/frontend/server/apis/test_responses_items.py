"""The items of OpenAI's Responses API: ids, thoughts and calls, and the item that an
error names.
"""

import msgspec
import pytest
from quire.frontend.server.apis.responses_items import Item, items_of, messages_of
from quire.frontend.server.http.errors import ApiError

CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}


def test_a_thought_before_a_call_without_text() -> None:
    (message,) = messages_of(None, [msgspec.convert(item, Item) for item in (THOUGHT, CALL)])
    assert (message["reasoning_content"], message["content"], len(message["tool_calls"])) == (
        "hm",
        "",
        1,
    )


def test_items_get_ids_and_keep_their_own() -> None:
    items = items_of(
        msgspec.convert([{"role": "user", "content": "hi"}, THOUGHT, CALL, RESULT], list[Item])
    )
    assert [item.id.split("_")[0] for item in items] == ["msg", "rs", "fc", "fco"] and items[
        1
    ].id == "rs_1"
    assert msgspec.to_builtins(items[0].content) == [{"type": "input_text", "text": "hi"}]


def test_indices_count_from_the_new_items() -> None:
    with pytest.raises(ApiError) as caught:
        messages_of(
            None,
            [
                Item(type="message", role="user", content="hi"),
                Item(type="message", role="robot", content="hi"),
            ],
            1,
        )
    assert caught.value.param == "input[0].role"


def test_an_error_in_a_call_of_an_earlier_turn_names_that_turn() -> None:
    items = [
        msgspec.convert(CALL | {"arguments": '{"a": '}, Item),
        Item(type="message", role="user", content="hi"),
    ]
    with pytest.raises(ApiError) as caught:
        messages_of(None, items, 1)
    assert caught.value.param == "previous_response_id.arguments"


def test_leading_system_messages_are_merged() -> None:
    items = [
        Item(type="message", role=role, content=role)
        for role in ("system", "developer", "user", "developer")
    ]
    found = messages_of("be brief", items)
    assert [(message["role"], message["content"]) for message in found] == [
        ("system", "be brief\nsystem\ndeveloper"),
        ("user", "user"),
        ("system", "developer"),
    ]
