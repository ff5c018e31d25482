"""Anthropic's client: messages, streams and their helpers, tools, token counting, and the
exceptions for Quire's errors.
"""

import asyncio
import json

import anthropic
from checks import ANSWER, QUESTION, TOOL, raises, run, until

REQUIREMENTS = {"anthropic": "anthropic", "anthropic_previous": "anthropic<2"}
DISTRIBUTION = "anthropic"
# newer versions have no argument for it
ASKED = {"model": "quire", "messages": QUESTION, "max_tokens": 16, "extra_body": {"temperature": 0}}
FUNCTION = TOOL["function"]
TOOLS = [
    {
        "name": FUNCTION["name"],
        "description": FUNCTION["description"],
        "input_schema": FUNCTION["parameters"],
    }
]
FORCED = ASKED | {
    "max_tokens": 200,
    "tools": TOOLS,
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
}


def client(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)


def check_message(address: str, _: str) -> None:
    answer = client(address).messages.create(**ASKED)
    (block,) = answer.content
    assert (block.type, block.text) == ("text", ANSWER) and (
        answer.role,
        answer.type,
        answer.model,
    ) == ("assistant", "message", "quire")
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None) and answer._request_id
    assert (
        answer.usage.input_tokens + answer.usage.cache_read_input_tokens > 0
        and answer.usage.output_tokens > 0
    )


def check_stream_helper(address: str, _: str) -> None:
    """The helper accumulates the events with Anthropic's own code."""
    with client(address).messages.stream(**ASKED) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert (
        text == final.content[0].text == ANSWER
        and final.stop_reason == "end_turn"
        and final.usage.output_tokens > 0
    )


def check_raw_stream(address: str, _: str) -> None:
    kinds = [event.type for event in client(address).messages.create(**ASKED, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-3:] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def check_stop_sequence(address: str, _: str) -> None:
    answer = client(address).messages.create(**ASKED, stop_sequences=["="])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "=") and answer.content[
        0
    ].text == "2 + 3 "
    assert client(address).messages.create(**ASKED | {"max_tokens": 1}).stop_reason == "max_tokens"


def check_system_and_prefill(address: str, _: str) -> None:
    system = [{"type": "text", "text": "Answer.", "cache_control": {"type": "ephemeral"}}]
    assert client(address).messages.create(**ASKED, system=system).content
    messages = [*QUESTION, {"role": "assistant", "content": "2 + 3 ="}]
    assert (
        client(address).messages.create(**ASKED | {"messages": messages}).content[0].text.strip()
        == "5"
    )


def check_tools(address: str, _: str) -> None:
    answer = client(address).messages.create(**FORCED)
    (call,) = answer.content
    assert answer.stop_reason == "tool_use" and (call.type, call.name) == ("tool_use", "weather")
    assert call.input["city"] in ("Rome", "Oslo") and 1 <= call.input["days"] <= 9
    with client(address).messages.stream(**FORCED) as stream:
        partial = "".join(event.partial_json for event in stream if event.type == "input_json")
        (streamed,) = stream.get_final_message().content
    assert streamed.input == call.input == json.loads(partial)
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "sunny"}],
    }
    messages = [
        *QUESTION,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    assert client(address).messages.create(
        **ASKED | {"messages": messages, "tools": TOOLS}
    ).stop_reason in ("end_turn", "max_tokens")


def check_counting(address: str, _: str) -> None:
    counted = client(address).messages.count_tokens(model="quire", messages=QUESTION, tools=TOOLS)
    usage = client(address).messages.create(**ASKED, tools=TOOLS).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def check_errors(address: str, _: str) -> None:
    messages = client(address).messages
    error = raises(
        anthropic.BadRequestError,
        lambda: messages.create(**ASKED | {"extra_body": {"temperature": -1}}),
    )
    assert (
        error.body["error"]["type"] == "invalid_request_error"
        and "temperature" in str(error)
        and error.request_id
    )
    raises(anthropic.NotFoundError, lambda: messages.create(**ASKED | {"model": "claude"}))
    raises(
        anthropic.BadRequestError,
        lambda: messages.create(**ASKED | {"messages": [{"role": "user", "content": "a " * 5000}]}),
    )
    image = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": "aGk="},
    }
    raises(
        anthropic.BadRequestError,
        lambda: messages.create(
            **ASKED | {"messages": [{"role": "user", "content": [image]}]}, stream=True
        ),
    )


def check_async(address: str, _: str) -> None:
    async def converse() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=address, api_key="none") as asynchronous:

            async def one() -> str:
                async with asynchronous.messages.stream(**ASKED) as stream:
                    return await stream.get_final_text()

            return await asyncio.gather(*[one() for _ in range(8)])

    assert asyncio.run(converse()) == [ANSWER] * 8


def batch_of(address: str, names: str, **fields: object) -> anthropic.types.messages.MessageBatch:
    """Return a new batch with a question for each letter, which is its custom_id."""
    params = {"model": "quire", "messages": QUESTION, "max_tokens": 16, "temperature": 0} | fields
    requests = [{"custom_id": name, "params": params} for name in names]
    return client(address).messages.batches.create(requests=requests)


def ended(address: str, id: str) -> anthropic.types.messages.MessageBatch:
    batches = client(address).messages.batches
    return until(lambda: batches.retrieve(id), lambda found: found.processing_status == "ended")


def check_batches(address: str, _: str) -> None:
    batches = client(address).messages.batches
    batch = batch_of(address, "abc")
    assert batch.processing_status == "in_progress" and batch.type == "message_batch"
    done = ended(address, batch.id)
    assert done.request_counts.succeeded == 3 and done.ended_at >= done.created_at
    results = {one.custom_id: one.result for one in batches.results(batch.id)}
    assert {name: one.message.content[0].text for name, one in results.items()} == dict.fromkeys(
        "abc", ANSWER
    )
    assert results["a"].type == "succeeded" and results["a"].message.stop_reason == "end_turn"
    assert batch.id in {one.id for one in batches.list(limit=1)}  # iterating reads every page
    assert batches.delete(batch.id).id == batch.id
    raises(anthropic.NotFoundError, lambda: batches.retrieve(batch.id))


def check_batches_with_errors(address: str, _: str) -> None:
    batches = client(address).messages.batches
    batch = batch_of(address, "ab", temperature=-1)
    assert ended(address, batch.id).request_counts.errored == 2
    result = next(iter(batches.results(batch.id))).result
    assert result.type == "errored" and result.error.error.type == "invalid_request_error"
    assert "temperature" in result.error.error.message
    long = batch_of(address, "abcdefgh", max_tokens=400)
    raises(anthropic.BadRequestError, lambda: batches.delete(long.id))
    assert batches.cancel(long.id).processing_status in ("canceling", "ended")
    assert ended(address, long.id).request_counts.processing == 0
    raises(anthropic.BadRequestError, lambda: batch_of(address, "aa"))
    raises(anthropic.NotFoundError, lambda: batches.retrieve("msgbatch_1"))


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
