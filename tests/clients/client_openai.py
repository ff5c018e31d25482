"""openai-python: all of its completions and chat interface, sync and async, and the exceptions for
Quire's errors.
"""

import asyncio
import json
from typing import Literal

import openai
from checks import ANSWER, QUESTION, TOOL, batch_lines, raises, run, until
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


ENDED = ("completed", "failed", "expired", "cancelled")


def batch_of(address: str, lines: bytes) -> openai.types.Batch:
    """Return a new batch of these lines."""
    api = client(address)
    file = api.files.create(file=("in.jsonl", lines), purpose="batch")
    return api.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"is": "mine"},
    )


def ended(address: str, batch: openai.types.Batch) -> openai.types.Batch:
    batches = client(address).batches
    return until(lambda: batches.retrieve(batch.id), lambda found: found.status in ENDED)


def check_files(address: str, _: str) -> None:
    files = client(address).files
    after = {"anchor": "created_at", "seconds": 3600}
    made = [
        files.create(file=("in.jsonl", b"{}\n"), purpose="batch", expires_after=after)
        for _ in range(3)
    ]
    assert made[0].expires_at == made[0].created_at + 3600 and made[0].filename == "in.jsonl"
    assert files.wait_for_processing(made[0].id).bytes == 3
    pages = files.list(limit=1, purpose="batch", order="asc")  # iterating reads every page
    assert {file.id for file in made} <= {file.id for file in pages}
    assert files.content(made[0].id).read() == b"{}\n" and files.content(made[0].id).text == "{}\n"
    assert files.delete(made[0].id).deleted
    raises(openai.NotFoundError, lambda: files.retrieve(made[0].id))
    wrong = raises(openai.BadRequestError, lambda: files.create(file=b"1", purpose="vision"))
    assert wrong.param == "purpose"


def check_batches(address: str, _: str) -> None:
    batch = batch_of(address, batch_lines("abc") + batch_lines("x", temperature=-1))
    done = ended(address, batch)
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 3, 1), done
    assert done.status == "completed" and done.metadata == {"is": "mine"} and done.errors is None
    answers = {}
    for line in client(address).files.content(done.output_file_id).text.splitlines():
        row = json.loads(line)
        answers[row["custom_id"]] = openai.types.chat.ChatCompletion.model_validate(
            row["response"]["body"], strict=True
        )
    assert {name: one.choices[0].message.content for name, one in answers.items()} == dict.fromkeys(
        "abc", ANSWER
    )
    (failed,) = client(address).files.content(done.error_file_id).iter_lines()
    assert json.loads(failed)["response"]["body"]["error"]["param"] == "temperature"
    assert done.id in {one.id for one in client(address).batches.list(limit=1)}


def check_batches_that_do_not_complete(address: str, _: str) -> None:
    failed = ended(address, batch_of(address, batch_lines("aa")))
    assert failed.status == "failed" and failed.errors.data[0].line == 2
    assert failed.errors.data[0].code == "duplicate_custom_id"
    long = batch_lines("abcdefgh", max_tokens=400, ignore_eos=True)
    batch = batch_of(address, long)
    assert client(address).batches.cancel(batch.id).status == "cancelling"
    assert ended(address, batch).status == "cancelled"
    raises(openai.ConflictError, lambda: client(address).batches.cancel(batch.id))
    raises(openai.NotFoundError, lambda: client(address).batches.retrieve("batch_1"))


def check_async_batches(address: str, _: str) -> None:
    async def listed() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as asynchronous:
            file = await asynchronous.files.create(file=batch_lines("a"), purpose="batch")
            batch = await asynchronous.batches.create(
                input_file_id=file.id,
                endpoint="/v1/chat/completions",
                completion_window="24h",
            )
            return [batch.id, *[one.id async for one in asynchronous.batches.list(limit=2)]]

    made, *found = asyncio.run(listed())
    assert found[0] == made


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
