"""litellm: completion, stream, tools, text completion, its own exceptions."""

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it downloads a table of prices

import litellm
from checks import ANSWER, QUESTION, TOOL, raises, run

REQUIREMENTS = {"litellm": "litellm mcp"}  # it imports mcp if tools are given
DISTRIBUTION = "litellm"


def complete(address: str, **fields: object) -> dict:
    base = {
        "model": "openai/quire",
        "api_base": f"{address}/v1",
        "api_key": "none",
        "messages": QUESTION,
        "max_tokens": 16,
        "temperature": 0,
    }
    return base | fields


def check_completion(address: str, _: str) -> None:
    answer = litellm.completion(**complete(address))
    assert (
        answer.choices[0].message.content == ANSWER
        and answer.choices[0].finish_reason == "stop"
        and answer.usage.total_tokens > 0
    )


def check_as_a_vllm_server(address: str, _: str) -> None:
    assert (
        litellm.completion(**complete(address, model="hosted_vllm/quire"))
        .choices[0]
        .message.content
        == ANSWER
    )


def check_stream(address: str, _: str) -> None:
    chunks = list(
        litellm.completion(**complete(address, stream=True, stream_options={"include_usage": True}))
    )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    )
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == ANSWER


def check_async_stream(address: str, _: str) -> None:
    async def converse() -> str:
        stream = await litellm.acompletion(**complete(address, stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(converse()) == ANSWER


def check_tools(address: str, _: str) -> None:
    answer = litellm.completion(
        **complete(address, tools=[TOOL], tool_choice="required", max_tokens=200)
    )
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in (
        "Rome",
        "Oslo",
    )


def check_text_completion(address: str, _: str) -> None:
    fields = complete(address, model="text-completion-openai/quire")
    del fields["messages"]
    assert litellm.text_completion(**fields, prompt="Once upon a time").choices[0].text


def check_errors(address: str, _: str) -> None:
    raises(
        litellm.ContextWindowExceededError,
        lambda: litellm.completion(
            **complete(address, messages=[{"role": "user", "content": "a " * 5000}])
        ),
    )
    raises(litellm.BadRequestError, lambda: litellm.completion(**complete(address, temperature=-1)))
    raises(
        litellm.NotFoundError,
        lambda: litellm.completion(**complete(address, model="openai/nothing")),
    )


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
