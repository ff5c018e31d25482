"""ollama's client: chat, generate, streams, formats, model information, and its exceptions."""

import asyncio
import json

import ollama
from checks import ANSWER, QUESTION, TOOL, raises, run

REQUIREMENTS = {"ollama": "ollama"}
DISTRIBUTION = "ollama"
GREEDY = {"temperature": 0, "num_predict": 16}
ASKED = {"model": "quire", "messages": QUESTION, "options": GREEDY}


def check_chat(address: str, _: str) -> None:
    answer = ollama.Client(address).chat(**ASKED)
    assert (
        answer.message.content == ANSWER
        and answer.message.role == "assistant"
        and answer.done
        and answer.done_reason == "stop"
    )
    assert (
        min(
            answer.total_duration,
            answer.prompt_eval_duration,
            answer.eval_duration,
            answer.prompt_eval_count,
            answer.eval_count,
        )
        > 0
    )
    assert (
        ollama.Client(address).chat(**ASKED | {"model": "quire:latest"}).message.content == ANSWER
    )


def check_chat_stream(address: str, _: str) -> None:
    parts = list(ollama.Client(address).chat(**ASKED, stream=True))
    assert (
        "".join(part.message.content for part in parts) == ANSWER
        and [part.done for part in parts].count(True) == 1
        and parts[-1].eval_count > 0
    )


def check_generate(address: str, _: str) -> None:
    fields = {"model": "quire", "prompt": QUESTION[0]["content"], "options": GREEDY}
    answer = ollama.Client(address).generate(**fields)
    assert answer.response == ANSWER and answer.eval_count > 0
    assert (
        "".join(part.response for part in ollama.Client(address).generate(**fields, stream=True))
        == ANSWER
    )
    assert ollama.Client(address).generate(**fields, system="Answer.").done
    assert ollama.Client(address).generate(**fields | {"prompt": "Once upon"}, raw=True).response
    assert ollama.Client(address).generate("quire").done_reason == "load"


def check_format(address: str, _: str) -> None:
    answer = ollama.Client(address).chat(**ASKED, format={"enum": ["red", "green"]})
    assert json.loads(answer.message.content) in ("red", "green")


def check_tools(address: str, _: str) -> None:
    """The model makes no tool call by itself. The test sends a call and its result, and checks that
    tools are accepted.
    """
    call = {"function": {"name": "weather", "arguments": {"city": "Rome", "days": 1}}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
    ]

    def weather(city: str, days: int) -> str:
        """The weather in a city."""

    assert ollama.Client(address).chat(**ASKED | {"messages": messages}, tools=[TOOL, weather]).done


def check_models(address: str, _: str) -> None:
    client = ollama.Client(address)
    (model,), (running,) = client.list().models, client.ps().models
    assert model.model == running.model == "quire" and model.size > 0 and running.context_length > 0
    shown = client.show("quire")
    assert (
        "completion" in shown.capabilities
        and "tools" in shown.capabilities
        and shown.modelinfo["general.parameter_count"] > 0
    )
    assert shown.template and shown.details.family
    assert client.pull("quire").status == "success"
    assert [part.status for part in client.pull("quire", stream=True)][-1] == "success"
    # a context above the limit is not an error
    large = {**ASKED, "options": {**ASKED.get("options", {}), "num_ctx": 10**6}}
    assert client.chat(**large).done


def check_errors(address: str, _: str) -> None:
    client = ollama.Client(address)
    assert (
        raises(ollama.ResponseError, lambda: client.chat(**ASKED | {"model": "llama3"})).status_code
        == 404
    )
    error = raises(ollama.ResponseError, lambda: client.chat(**ASKED | {"options": {"top_p": 2}}))
    assert error.status_code == 400 and "top_p" in error.error
    long = ASKED | {"messages": [{"role": "user", "content": "a " * 5000}]}
    assert (
        "context length"
        in raises(ollama.ResponseError, lambda: list(client.chat(**long, stream=True))).error
    )
    for call, status in (
        (lambda: client.pull("llama3"), 404),
        (lambda: list(client.pull("llama3", stream=True)), 404),
        (lambda: client.delete("quire"), 403),
    ):
        error = raises(ollama.ResponseError, call)
        assert error.status_code == status and "--allow-model-changes" in error.error
    too_short = {"model": "quire", "input": "hi", "dimensions": 3}
    assert raises(ollama.ResponseError, lambda: client.embed(**too_short)).status_code == 400


def check_embeddings(address: str, _: str) -> None:
    client = ollama.Client(address)
    answer = client.embed("quire", ["a cat", "a dog"])
    first, second = answer.embeddings
    assert len(first) == len(second) and abs(sum(x * x for x in first) - 1) < 1e-5
    assert answer.prompt_eval_count > 0 and answer.total_duration > 0
    assert client.embed("quire", "a cat").embeddings == [first]
    assert client.embeddings("quire", "a dog").embedding == second
    assert client.embed("quire", "word " * 10_000, truncate=True).embeddings
    too_long = {"model": "quire", "input": "word " * 10_000, "truncate": False}
    assert raises(ollama.ResponseError, lambda: client.embed(**too_long)).status_code == 400


def check_async(address: str, _: str) -> None:
    async def one() -> str:
        return "".join(
            [
                part.message.content
                async for part in await ollama.AsyncClient(address).chat(**ASKED, stream=True)
            ]
        )

    async def converse() -> list[str]:
        return await asyncio.gather(*[one() for _ in range(8)])

    assert asyncio.run(converse()) == [ANSWER] * 8


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
