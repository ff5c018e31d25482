"""openai-python's Responses API: whole and streamed answers, its helpers, tools, stored
conversations, and errors.
"""

import asyncio
import json
from typing import Literal

import openai
from checks import ANSWER, QUESTION, TOOL, raises, run
from pydantic import BaseModel

REQUIREMENTS = {"openai_responses": "openai", "openai_responses_previous": "openai<3"}
DISTRIBUTION = "openai"
ASKED = {"model": "quire", "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
FUNCTION = {"type": "function", "strict": True, **TOOL["function"]}
FORCED = {
    "max_output_tokens": 200,
    "tools": [FUNCTION],
    "tool_choice": {"type": "function", "name": "weather"},
    "parallel_tool_calls": False,
}


def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def check_response(address: str, _: str) -> None:
    answer = client(address).responses.create(**ASKED)
    assert answer.output_text == ANSWER and (answer.status, answer.object, answer.model) == (
        "completed",
        "response",
        "quire",
    )
    assert (
        answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
        and answer._request_id
    )
    assert (
        client(address).responses.create(**ASKED | {"input": "What is 2 + 3?"}).output_text
        == ANSWER
    )
    assert (
        client(address)
        .responses.create(**ASKED | {"max_output_tokens": 1})
        .incomplete_details.reason
        == "max_output_tokens"
    )


def check_stream(address: str, _: str) -> None:
    events = list(client(address).responses.create(**ASKED, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == ANSWER
    )
    assert (
        events[0].type == "response.created"
        and events[-1].type == "response.completed"
        and events[-1].response.output_text == ANSWER
    )


def check_stream_helper(address: str, _: str) -> None:
    """The helper accumulates the events with OpenAI's own code."""
    with client(address).responses.stream(**ASKED) as stream:
        snapshots = [
            event.snapshot for event in stream if event.type == "response.output_text.delta"
        ]
        final = stream.get_final_response()
    assert snapshots[-1] == final.output_text == ANSWER


def check_log_probabilities(address: str, _: str) -> None:
    answer = client(address).responses.create(
        **ASKED, include=["message.output_text.logprobs"], top_logprobs=2
    )
    logprobs = answer.output[0].content[0].logprobs
    assert len(logprobs) == answer.usage.output_tokens and all(
        len(one.top_logprobs) == 2 for one in logprobs
    )


def check_tools(address: str, _: str) -> None:
    (call,) = client(address).responses.create(**ASKED | FORCED).output
    arguments = json.loads(call.arguments)
    assert (
        (call.type, call.name) == ("function_call", "weather")
        and arguments["city"] in ("Rome", "Oslo")
        and 1 <= arguments["days"] <= 9
    )
    with client(address).responses.stream(**ASKED | FORCED) as stream:
        deltas = [
            event for event in stream if event.type == "response.function_call_arguments.delta"
        ]
        (streamed,) = stream.get_final_response().output
    assert (
        streamed.arguments
        == call.arguments
        == "".join(event.delta for event in deltas)
        == deltas[-1].snapshot
    )
    items = [
        *QUESTION,
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    assert client(address).responses.create(**ASKED | {"input": items}).status in (
        "completed",
        "incomplete",
    )


def check_parsed_output(address: str, _: str) -> None:
    class Days(BaseModel):
        unit: Literal["day"]

    answer = client(address).responses.create(
        **ASKED,
        text={
            "format": {"type": "json_schema", "name": "color", "schema": {"enum": ["red", "green"]}}
        },
    )
    assert json.loads(answer.output_text) in ("red", "green")
    parsed = client(address).responses.parse(**ASKED | FORCED, text_format=Days)
    assert parsed.output[0].parsed_arguments["city"] in ("Rome", "Oslo")


def check_conversation(address: str, _: str) -> None:
    responses = client(address).responses
    first = responses.create(**ASKED, metadata={"a": "b"})
    second = responses.create(**ASKED | {"input": "And 3 + 4?"}, previous_response_id=first.id)
    assert (
        second.previous_response_id == first.id
        and second.usage.input_tokens > first.usage.input_tokens
    )
    # over two pages
    texts = [
        item.content[0].text for item in responses.input_items.list(second.id, order="asc", limit=2)
    ]
    assert texts == ["What is 2 + 3?", ANSWER, "And 3 + 4?"]
    kept = responses.retrieve(first.id)
    assert kept.output_text == ANSWER and kept.metadata == {"a": "b"}
    raises(openai.BadRequestError, lambda: responses.cancel(first.id))
    responses.delete(first.id)
    raises(openai.NotFoundError, lambda: responses.retrieve(first.id))
    error = raises(
        openai.BadRequestError, lambda: responses.create(**ASKED, previous_response_id=first.id)
    )
    assert error.code == "previous_response_not_found"


def check_kept_conversation(address: str, _: str) -> None:
    """A conversation as an object of its own, which responses add to."""
    api = client(address)
    conversation = api.conversations.create(items=[QUESTION[0]], metadata={"a": "b"})
    asked = ASKED | {"input": "And 3 + 4?", "conversation": conversation.id}
    answer = api.responses.create(**asked)
    assert answer.conversation.id == conversation.id
    items = list(api.conversations.items.list(conversation.id, order="asc", limit=2))
    assert [item.content[0].text for item in items[:2]] == ["What is 2 + 3?", "And 3 + 4?"]
    assert items[2].content[0].text == answer.output_text and len(items) == 3
    api.conversations.items.delete(items[0].id, conversation_id=conversation.id)
    assert api.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert api.conversations.retrieve(conversation.id).metadata == {"c": "d"}
    assert api.conversations.delete(conversation.id).deleted
    raises(openai.NotFoundError, lambda: api.conversations.retrieve(conversation.id))


def check_compaction(address: str, _: str) -> None:
    responses = client(address).responses
    made = responses.compact(model="quire", input=QUESTION)
    assert made.object == "response.compaction"
    assert [item.type for item in made.output] == ["message", "compaction"]
    go_on = [*(item.to_dict() for item in made.output), {"role": "user", "content": "And 4?"}]
    assert responses.create(**ASKED | {"input": go_on}).status == "completed"


def check_custom_tools(address: str, _: str) -> None:
    """Free text under a grammar; a tool that OpenAI would run is left out."""
    format = {"type": "grammar", "syntax": "lark", "definition": 'start: ("a" | "b") "\\n" /c{2}/'}
    tool = {"type": "custom", "name": "letters", "format": format}
    asked = ASKED | {
        "max_output_tokens": 60,
        "tools": [tool, {"type": "web_search"}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    responses = client(address).responses
    [call] = responses.create(**asked).output
    assert (call.type, call.name) == ("custom_tool_call", "letters")
    assert call.input in ("a\ncc", "b\ncc")
    with responses.stream(**asked) as stream:
        events = [event for event in stream if "custom_tool_call_input" in event.type]
    assert events[-1].input == call.input == "".join(event.delta for event in events[:-1])


def check_errors(address: str, _: str) -> None:
    responses = client(address).responses
    error = raises(openai.BadRequestError, lambda: responses.create(**ASKED | {"temperature": -1}))
    assert (error.param, error.type) == (
        "temperature",
        "invalid_request_error",
    ) and error.request_id
    assert (
        raises(openai.BadRequestError, lambda: responses.create(**ASKED, background=True)).param
        == "background"
    )
    error = raises(
        openai.BadRequestError,
        lambda: responses.create(**ASKED | {"input": "a " * 5000}, stream=True),
    )
    assert (error.code, error.param) == ("context_length_exceeded", "input")
    raises(openai.NotFoundError, lambda: responses.create(**ASKED | {"model": "gpt-5"}))


def check_async(address: str, _: str) -> None:
    async def converse() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as asynchronous:

            async def one() -> str:
                async with asynchronous.responses.stream(**ASKED) as stream:
                    return (await stream.get_final_response()).output_text

            return await asyncio.gather(*[one() for _ in range(8)])

    assert asyncio.run(converse()) == [ANSWER] * 8


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
