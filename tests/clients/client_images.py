"""An image from each client: openai, anthropic, ollama, langchain and litellm, against a tiny model
that reads images. Its answers are random; the tokens of the prompt show that it got the image.
"""

import base64
import struct
import zlib
from typing import Any

import anthropic
import litellm
import ollama
import openai
from checks import raises, run
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

REQUIREMENTS = {"images": "openai anthropic ollama langchain-openai litellm"}
DISTRIBUTION = "openai"
MODEL = "qwen3_5"  # of tests/seeing_models.py
TEXT = "What is it?"
LEAST = 16  # tokens that an image takes


def png(width: int, height: int, colour: tuple[int, int, int]) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes(colour) * width) * height
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


RED = png(64, 48, (200, 30, 30))
BASE64 = base64.b64encode(RED).decode()
URL = f"data:image/png;base64,{BASE64}"
PARTS = [
    {"type": "text", "text": TEXT},
    {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
]
BLOCK = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": BASE64},
}


def asked(content: Any) -> dict[str, Any]:
    return {
        "model": "quire",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 4,
        "temperature": 0,
    }


def openai_client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def check_openai_chat(address: str, _: str) -> None:
    create = openai_client(address).chat.completions.create
    text, seen = create(**asked(TEXT)), create(**asked(PARTS))
    assert seen.usage.prompt_tokens >= text.usage.prompt_tokens + LEAST
    chunks = list(create(**asked(PARTS), stream=True))
    told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert told == seen.choices[0].message.content  # the same image: the same tokens


def check_openai_responses(address: str, _: str) -> None:
    client = openai_client(address)
    image = {"type": "input_image", "image_url": URL, "detail": "auto"}
    given = [{"role": "user", "content": [{"type": "input_text", "text": TEXT}, image]}]
    first = client.responses.create(model="quire", input=given, max_output_tokens=16)
    assert first.usage.input_tokens > LEAST
    more = client.responses.create(
        model="quire", input="Sure?", previous_response_id=first.id, max_output_tokens=16
    )
    assert more.usage.input_tokens > first.usage.input_tokens


def check_openai_error(address: str, _: str) -> None:
    create = openai_client(address).chat.completions.create
    bad = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,!"}}]
    error = raises(openai.BadRequestError, lambda: create(**asked(bad)))
    assert error.param == "messages[0].content[0].image_url.url"


def check_anthropic(address: str, _: str) -> None:
    client = anthropic.Anthropic(base_url=address, api_key="none", max_retries=0)
    messages = [{"role": "user", "content": [BLOCK, {"type": "text", "text": TEXT}]}]
    answer = client.messages.create(model="quire", max_tokens=4, messages=messages)
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > LEAST
    counted = client.messages.count_tokens(model="quire", messages=messages)
    assert counted.input_tokens > LEAST
    with client.messages.stream(model="quire", max_tokens=4, messages=messages) as stream:
        assert stream.get_final_message().role == "assistant"


def check_ollama(address: str, _: str) -> None:
    client = ollama.Client(address)
    assert "vision" in client.show("quire").capabilities
    message = {"role": "user", "content": TEXT, "images": [RED]}
    options = {"num_predict": 4, "temperature": 0}
    answer = client.chat(model="quire", messages=[message], options=options)
    assert answer.prompt_eval_count > LEAST
    made = client.generate(model="quire", prompt=TEXT, images=[RED], options=options)
    assert made.prompt_eval_count == answer.prompt_eval_count


def check_langchain(address: str, _: str) -> None:
    model = ChatOpenAI(base_url=f"{address}/v1", api_key="none", model="quire", max_tokens=4)
    answer = model.invoke([HumanMessage(content=PARTS)])
    assert answer.usage_metadata["input_tokens"] > LEAST


def check_litellm(address: str, _: str) -> None:
    answer = litellm.completion(
        **asked(PARTS) | {"model": "openai/quire"}, api_base=f"{address}/v1", api_key="none"
    )
    assert answer.usage.prompt_tokens > LEAST


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
