"""openai-python: all of its completions and chat interface, sync and async, and the exceptions for
Quire's errors.
"""

import asyncio
import json
from typing import Literal

import openai
from checks import ANSWER, QUESTION, TOOL, raises, run
from pydantic import BaseModel

REQUIREMENTS = {"openai": "openai", "openai_previous": "openai<3"}
DISTRIBUTION = "openai"
CHAT = {"model": "quire", "messages": QUESTION, "max_tokens": 16, "temperature": 0}


def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def check_models(address: str, _: str) -> None:
    (model,) = client(address).models.list().data
    assert (
        client(address).models.retrieve(model.id).id == model.id == "quire"
        and model.object == "model"
    )
    error = raises(openai.NotFoundError, lambda: client(address).models.retrieve("nothing"))
    assert error.code == "model_not_found"


def check_chat(address: str, _: str) -> None:
    answer = client(address).chat.completions.create(**CHAT)
    assert answer.choices[0].message.content == ANSWER and answer.choices[0].finish_reason == "stop"
    assert (
        answer.choices[0].message.role == "assistant"
        and answer.choices[0].message.tool_calls is None
    )
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert (
        answer.usage.prompt_tokens_details.cached_tokens >= 0
        and answer.system_fingerprint.startswith("fp_")
        and answer._request_id
    )


def check_chat_stream(address: str, _: str) -> None:
    chunks = list(
        client(address).chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == ANSWER
    assert (
        chunks[0].choices[0].delta.role == "assistant"
        and chunks[-2].choices[0].finish_reason == "stop"
    )
    assert (
        chunks[-1].choices == []
        and chunks[-1].usage.completion_tokens > 0
        and all(c.usage is None for c in chunks[:-1])
    )


def check_chat_stream_helper(address: str, _: str) -> None:
    """The helper accumulates the chunks with OpenAI's own code."""
    with client(address).chat.completions.stream(**CHAT) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert (
        "content.delta" in kinds
        and "content.done" in kinds
        and final.choices[0].message.content == ANSWER
    )


def check_log_probabilities(address: str, _: str) -> None:
    answer = client(address).chat.completions.create(**CHAT, logprobs=True, top_logprobs=5)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens and all(
        len(entry.top_logprobs) == 5 for entry in content
    )
    assert b"".join(bytes(entry.bytes) for entry in content).decode().startswith(ANSWER)
    legacy = (
        client(address)
        .completions.create(
            model="quire", prompt="Once", max_tokens=4, logprobs=2, echo=True, temperature=0
        )
        .choices[0]
    )
    assert legacy.text.startswith("Once") and legacy.logprobs.token_logprobs[0] is None
    assert [
        legacy.text[o:].startswith(t)
        for t, o in zip(legacy.logprobs.tokens, legacy.logprobs.text_offset, strict=True)
    ].count(False) == 0


def check_completions(address: str, _: str) -> None:
    fields = {
        "model": "quire",
        "prompt": ["Once upon a time", "The"],
        "max_tokens": 5,
        "n": 2,
        "seed": 7,
    }
    answer = client(address).completions.create(**fields)
    texts = dict.fromkeys(range(4), "")
    for chunk in client(address).completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in answer.choices] == list(texts.values()) and [
        c.index for c in answer.choices
    ] == [0, 1, 2, 3]


def check_structured_output(address: str, _: str) -> None:
    class Color(BaseModel):
        name: Literal["red", "green"]

    answer = client(address).chat.completions.parse(
        **CHAT | {"max_tokens": 300}, response_format=Color
    )
    assert answer.choices[0].message.parsed.name in ("red", "green")
    guided = client(address).chat.completions.create(
        **CHAT, extra_body={"structured_outputs": {"regex": "[0-9]{3}"}}
    )
    assert len(guided.choices[0].message.content) == 3


def check_tools(address: str, _: str) -> None:
    fields = CHAT | {
        "max_tokens": 200,
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    (call,) = client(address).chat.completions.create(**fields).choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (
        call.function.name == "weather"
        and arguments["city"] in ("Rome", "Oslo")
        and 1 <= arguments["days"] <= 9
    )
    with client(address).chat.completions.stream(**fields) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert (
        streamed.function.arguments
        == call.function.arguments
        == "".join(event.arguments_delta for event in deltas)
    )
    messages = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert (
        client(address)
        .chat.completions.create(**CHAT | {"messages": messages})
        .choices[0]
        .message.content
        is not None
    )


def check_errors(address: str, _: str) -> None:
    chat = client(address).chat.completions
    error = raises(openai.BadRequestError, lambda: chat.create(**CHAT | {"temperature": -1}))
    assert (error.param, error.type) == (
        "temperature",
        "invalid_request_error",
    ) and error.request_id
    error = raises(
        openai.BadRequestError,
        lambda: chat.create(**CHAT | {"messages": [{"role": "user", "content": "a " * 5000}]}),
    )
    assert error.code == "context_length_exceeded"
    raises(openai.NotFoundError, lambda: chat.create(**CHAT | {"model": "gpt-5"}))
    error = raises(
        openai.BadRequestError,
        lambda: client(address).embeddings.create(model="quire", input="x", dimensions=3),
    )
    assert error.param == "dimensions"


def check_embeddings(address: str, _: str) -> None:
    """The client asks for base64 by itself, and decodes it."""
    embeddings, texts = client(address).embeddings, [f"text {i}" for i in range(64)]
    answer = embeddings.create(model="quire", input=texts)
    assert [entry.index for entry in answer.data] == list(range(64))
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 64
    plain = embeddings.create(model="quire", input=texts[5], encoding_format="float")
    assert list(answer.data[5].embedding) == plain.data[0].embedding
    assert embeddings.create(model="quire", input=[[1, 2, 3]]).usage.prompt_tokens == 3


def check_raw_headers(address: str, _: str) -> None:
    answer = client(address).chat.completions.with_raw_response.create(
        **CHAT, user="me", extra_body={"mood": "good"}
    )
    assert (
        answer.headers["x-ignored-params"] == "user"
        and answer.headers["x-unknown-params"] == "mood"
        and answer.headers["x-request-id"]
    )


def check_async(address: str, _: str) -> None:
    async def converse() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as asynchronous:

            async def one() -> str:
                stream = await asynchronous.chat.completions.create(**CHAT, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*[one() for _ in range(8)])

    assert asyncio.run(converse()) == [ANSWER] * 8


def check_leaving_a_stream(address: str, _: str) -> None:
    stream = client(address).chat.completions.create(
        **CHAT | {"max_tokens": 500, "temperature": 1}, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert client(address).chat.completions.create(**CHAT).choices[0].message.content == ANSWER


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
