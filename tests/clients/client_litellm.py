"""litellm: completion, stream, tools, text completion, its own exceptions."""

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it downloads a table of prices

import litellm
from checks import ANSWER, QUESTION, TOOL, batch_lines, raises, run, until

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


def check_files_and_batches(address: str, _: str) -> None:
    server = {"custom_llm_provider": "openai", "api_base": f"{address}/v1", "api_key": "none"}
    file = litellm.create_file(file=("in.jsonl", batch_lines("abc")), purpose="batch", **server)
    batch = litellm.create_batch(
        completion_window="24h",
        endpoint="/v1/chat/completions",
        input_file_id=file.id,
        metadata={"is": "mine"},
        **server,
    )

    def look() -> object:
        return litellm.retrieve_batch(batch_id=batch.id, **server)

    done = until(look, lambda found: found.status in ("completed", "failed"))
    assert done.status == "completed" and done.request_counts.completed == 3, done
    answers = litellm.file_content(file_id=done.output_file_id, **server).text.splitlines()
    bodies = [json.loads(line)["response"]["body"] for line in answers]
    assert [body["choices"][0]["message"]["content"] for body in bodies] == [ANSWER] * 3
    assert batch.id in {one.id for one in litellm.list_batches(limit=20, **server).data}
    assert litellm.file_delete(file_id=file.id, **server).deleted


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
