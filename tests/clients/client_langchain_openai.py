"""langchain-openai: invoke, stream, batches, bound tools, structured output, log-probabilities."""

import asyncio
from typing import Any, Literal

from checks import ANSWER, TOOL, run
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

REQUIREMENTS = {"langchain_openai": "langchain-openai"}
DISTRIBUTION = "langchain-openai"
QUESTION = "What is 2 + 3?"


def chat(address: str, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="quire",
        base_url=f"{address}/v1",
        api_key="none",
        temperature=0,
        **{"max_tokens": 16} | fields,
    )


def check_invoke(address: str, _: str) -> None:
    answer = chat(address).invoke(QUESTION)
    assert (
        answer.content == ANSWER
        and answer.usage_metadata["total_tokens"] > 0
        and answer.response_metadata["finish_reason"] == "stop"
    )


def check_stream(address: str, _: str) -> None:
    chunks = list(chat(address, stream_usage=True).stream(QUESTION))
    assert "".join(chunk.text for chunk in chunks) == ANSWER and any(
        chunk.usage_metadata for chunk in chunks
    )


def check_async_batch(address: str, _: str) -> None:
    assert [answer.content for answer in asyncio.run(chat(address).abatch([QUESTION] * 5))] == [
        ANSWER
    ] * 5


def check_tools(address: str, _: str) -> None:
    bound = chat(address, max_tokens=200).bind_tools([TOOL], tool_choice="weather")
    (call,) = bound.invoke(QUESTION).tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Oslo")
    whole = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == call["args"]


def check_structured_output(address: str, _: str) -> None:
    class Color(BaseModel):
        """A color."""

        name: Literal["red", "green"]

    for method in ("function_calling", "json_schema"):
        model = chat(address, max_tokens=300, logit_bias=None).with_structured_output(
            Color, method=method
        )
        assert model.invoke("Name a color.").name in ("red", "green")


def check_log_probabilities(address: str, _: str) -> None:
    answer = chat(address, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2


def check_embeddings(address: str, _: str) -> None:
    """Texts are sent as they are: otherwise it sends ids of OpenAI's own tokenizer."""
    embeddings = OpenAIEmbeddings(
        model="quire",
        base_url=f"{address}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
    )
    texts = [f"text {i}" for i in range(100)]
    rows = embeddings.embed_documents(texts)
    assert len(rows) == 100 and abs(sum(x * x for x in rows[0]) - 1) < 1e-5
    assert embeddings.embed_query(texts[7]) == rows[7]
    assert asyncio.run(embeddings.aembed_query(texts[7])) == rows[7]


def check_text_completion(address: str, _: str) -> None:
    assert OpenAI(model="quire", base_url=f"{address}/v1", api_key="none", max_tokens=8).invoke(
        "Once upon a time"
    )


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
