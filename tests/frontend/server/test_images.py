"""Images in the bodies of every API: the prompts that they become, and refusals."""

from __future__ import annotations

from typing import Any

import pytest
from quire.frontend.server.app import App
from quire.tests.fake_images import ROWS, UNREADABLE, fake_inputs, with_vision
from quire.tests.frontend.server.scripted import (
    ScriptedEngine,
    named_events,
    post,
    scripted_app,
    talk,
)

MARK = "<|endoftext|>"
TEMPLATE = (
    "{% macro write(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{% if part.type == 'image' %}" + MARK + "{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}[{{ m.role }}]{{ write(m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
)
PIXEL = "aGk="
URL = f"data:image/png;base64,{PIXEL}"
SENT = f"data:image;base64,{PIXEL}"  # of what is given in base64 alone
CHAT, COUNT = "/v1/chat/completions", "/v1/messages/count_tokens"
OPENAI_PART = {"type": "image_url", "image_url": {"url": URL}}
ANTHROPIC_PART = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PIXEL},
}
WHAT = {"type": "text", "text": "What?"}
INPUT_PART = {"type": "input_image", "image_url": URL}
INPUT_WHAT = {"type": "input_text", "text": "What?"}


class SeeingEngine(ScriptedEngine):
    """A scripted engine of a model that reads images, and keeps the prompts whole."""

    def __init__(self, **settings: Any):
        super().__init__(["A ", "cat."])
        assert self.tokenizer is not None
        [token_id] = self.tokenizer.encode(MARK, add_special_tokens=False)
        self.config = with_vision(self.config, token_id, **settings)
        self.images, self.preparer = fake_inputs(self.config, self.tokenizer)
        self.given: list[dict[str, Any]] = []

    async def generate(self, prompt: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        self.given.append(prompt)
        async for output in super().generate(prompt, *arguments, **options):
            yield output


def seeing_app(**settings: Any) -> tuple[App, SeeingEngine]:
    engine = SeeingEngine(**settings)
    return scripted_app(engine, TEMPLATE), engine


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts]}]


CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL_USE = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": [ANTHROPIC_PART, WHAT]}
# path, body, the text of the prompt, and place and value of each image
PROMPTS = {
    "openai": (
        CHAT,
        {"messages": user(OPENAI_PART, WHAT)},
        f"[user]{MARK}What?",
        [("messages[0].content[0].image_url.url", URL)],
    ),
    "openai, a text with the placeholder": (
        CHAT,
        {"messages": user(OPENAI_PART, {"type": "text", "text": f"{MARK}?"})},
        f"[user]{MARK}<\u200b|endoftext|>?",
        [("messages[0].content[0].image_url.url", URL)],
    ),
    "openai, url alone": (
        CHAT,
        {"messages": user(WHAT, {"type": "image_url", "image_url": URL}, OPENAI_PART)},
        f"[user]What?{MARK}{MARK}",
        [
            ("messages[0].content[1].image_url", URL),
            ("messages[0].content[2].image_url.url", URL),
        ],
    ),
    "openai, result of a tool": (
        CHAT,
        {
            "messages": [
                *user(WHAT),
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": [OPENAI_PART]},
            ]
        },
        '[user]What?[assistant]{"name": "look", "arguments": {}}[tool]' + MARK,
        [("messages[2].content[0].image_url.url", URL)],
    ),
    "anthropic": (
        "/v1/messages",
        {"max_tokens": 5, "messages": user(ANTHROPIC_PART, WHAT)},
        f"[user]{MARK}What?",
        [("messages[0].content[0].source.data", SENT)],
    ),
    "anthropic, url": (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": user(WHAT, {"type": "image", "source": {"type": "url", "url": "http://x"}}),
        },
        f"[user]What?{MARK}",
        [("messages[0].content[1].source.url", "http://x")],
    ),
    "anthropic, result of a tool": (
        "/v1/messages",
        {
            "max_tokens": 5,
            "messages": [
                *user(WHAT),
                {"role": "assistant", "content": [TOOL_USE]},
                {"role": "user", "content": [RESULT]},
            ],
        },
        '[user]What?[assistant]{"name": "look", "arguments": {}}[tool]' + f"{MARK}What?",
        [("messages[2].content[0].content[0].source.data", SENT)],
    ),
    "responses": (
        "/v1/responses",
        {"input": user(INPUT_PART, INPUT_WHAT)},
        f"[user]{MARK}What?",
        [("input[0].content[0].image_url", URL)],
    ),
    "responses, output of a call": (
        "/v1/responses",
        {
            "input": [
                *user(INPUT_WHAT),
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": [INPUT_PART]},
            ]
        },
        '[user]What?[assistant]{"name": "look", "arguments": {}}[tool]' + MARK,
        [("input[2].output[0].image_url", URL)],
    ),
    "ollama": (
        "/api/chat",
        {
            "model": "bundled",
            "stream": False,
            "messages": [{"role": "user", "content": "What?", "images": [PIXEL, PIXEL]}],
        },
        f"[user]{MARK}{MARK}What?",
        [("messages[0].images[0]", SENT), ("messages[0].images[1]", SENT)],
    ),
    "ollama, generate": (
        "/api/generate",
        {"model": "bundled", "stream": False, "prompt": "What?", "images": [PIXEL]},
        f"[user]{MARK}What?",
        [("images[0]", SENT)],
    ),
    "ollama, raw": (
        "/api/generate",
        {
            "model": "bundled",
            "stream": False,
            "raw": True,
            "prompt": f"{MARK} it is",
            "images": [PIXEL],
        },
        f"{MARK} it is",
        [("images[0]", SENT)],
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name) -> None:
    path, body, text, images = PROMPTS[name]
    app, engine = seeing_app()
    answer = post(app, path, body)
    assert answer.status_code == 200, answer.text
    [prompt] = engine.given
    assert prompt["prompt"] == text
    assert [(source.parameter, source.value) for source in engine.preparer.sources] == images
    items = prompt["multi_modal_data"].items
    token_ids, [token_id, *_] = prompt["prompt_token_ids"], engine.tokenizer.encode(MARK)
    assert len(items) == len(images) and token_ids.count(token_id) == ROWS * len(images)
    assert URL not in answer.text and "x-ignored-params" not in answer.headers


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        ("/tokenize", {"messages": user(OPENAI_PART, WHAT)}, lambda body: body["count"]),
        (COUNT, {"messages": user(ANTHROPIC_PART, WHAT)}, lambda body: body["input_tokens"]),
        (
            "/v1/responses/input_tokens",
            {"input": user(INPUT_PART, INPUT_WHAT)},
            lambda body: body["input_tokens"],
        ),
    ],
)
def test_tokens_are_counted_with_those_of_images(path, body, count) -> None:
    app, engine = seeing_app()
    answer = post(app, path, body)
    assert answer.status_code == 200, answer.text
    assert engine.tokenizer is not None
    text = f"[user]{MARK}What?"
    assert count(answer.json()) == len(engine.tokenizer.encode(text)) + ROWS - 1


def test_a_stored_conversation_keeps_its_images() -> None:
    app, engine = seeing_app()
    first = post(app, "/v1/responses", {"input": user(INPUT_PART, INPUT_WHAT)}).json()
    more = {"input": "Sure?", "previous_response_id": first["id"]}
    assert post(app, "/v1/responses", more).status_code == 200
    assert engine.given[-1]["prompt"] == f"[user]{MARK}What?[assistant]A cat.[user]Sure?"
    assert [source.parameter for source in engine.preparer.sources] == [
        "previous_response_id.content[0].image_url"
    ]
    path = f"/v1/responses/{first['id']}/input_items"
    [item] = talk(app, lambda client: client.get(path)).json()["data"]
    assert item["content"][0]["image_url"] == URL


def test_an_answer_is_streamed() -> None:
    app, _ = seeing_app()
    body = {"max_tokens": 5, "stream": True, "messages": user(ANTHROPIC_PART, WHAT)}
    events = named_events(post(app, "/v1/messages", body))
    assert events[-1][0] == "message_stop"


def chat(*parts: Any, role: str = "user") -> tuple[str, dict[str, Any]]:
    return CHAT, {
        "messages": [*user(WHAT), {"role": role, "content": [*parts], "tool_call_id": "c"}]
    }


def anthropic(*parts: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"max_tokens": 5, "messages": user(*parts)}


def image_url(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


FILE = {"type": "image", "source": {"type": "file", "file_id": "f"}}
# the request, the field that the error names, and words of it
REFUSED = {
    "unreadable": (
        chat(WHAT, image_url({"url": UNREADABLE})),
        "messages[1].content[1].image_url.url",
        "is not base64",
    ),
    "no url": (chat({"type": "image_url"}), "messages[1].content[0].image_url", "Missing"),
    "url of another type": (chat(image_url(5)), "messages[1].content[0].image_url", "Invalid"),
    "url missing in the object": (
        chat(image_url({})),
        "messages[1].content[0].image_url.url",
        "Missing",
    ),
    "too many": (
        chat(*[image_url(URL)] * 1000),
        "messages[1].content[16].image_url",
        "is one image too many: a prompt can have 16 (limit_mm_per_prompt), this one has 1000",
    ),
    "of the assistant": (
        chat(OPENAI_PART, role="assistant"),
        "messages[1].content[0].type",
        "Only messages of the user",
    ),
    "of the system": (
        chat(OPENAI_PART, role="system"),
        "messages[1].content[0].type",
        "Only messages of the user",
    ),
    "video": (
        chat({"type": "video_url"}),
        "messages[1].content[0].type",
        "reads text and images only",
    ),
    "anthropic, no source": (
        anthropic({"type": "image"}),
        None,
        "'messages[0].content[0].source'",
    ),
    "anthropic, file": (anthropic(FILE), None, "must be base64 or url, got 'file'"),
    "anthropic, no data": (
        anthropic({"type": "image", "source": {"type": "base64"}}),
        None,
        "'messages[0].content[0].source.data'",
    ),
    "anthropic, document": (anthropic({"type": "document"}), None, "reads text and images only"),
    "responses, file": (
        ("/v1/responses", {"input": user({"type": "input_image", "file_id": "f"})}),
        "input[0].content[0].file_id",
        "file of OpenAI's",
    ),
    "responses, none": (
        ("/v1/responses", {"input": user({"type": "input_image"})}),
        "input[0].content[0].image_url",
        "Missing",
    ),
    "responses, of the assistant": (
        ("/v1/responses", {"input": [{"role": "assistant", "content": [INPUT_PART]}]}),
        "input[0].content",
        "cannot have an image",
    ),
    "ollama, of the system": (
        (
            "/api/chat",
            {
                "model": "bundled",
                "messages": [{"role": "system", "content": "a", "images": [PIXEL]}],
            },
        ),
        None,
        "messages[0].images: cannot have an image",
    ),
    "ollama, raw without a placeholder": (
        (
            "/api/generate",
            {"model": "bundled", "raw": True, "prompt": "a", "images": [PIXEL]},
        ),
        None,
        "prompt: must have one placeholder",
    ),
    "too long": (chat({"type": "text", "text": "word " * 1000}, OPENAI_PART), "messages", "512"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name) -> None:
    (path, body), param, words = REFUSED[name]
    app, engine = seeing_app()
    answer = post(app, path, body)
    assert answer.status_code == 400, answer.text
    assert words in answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param
    assert not engine.given


def test_the_detail_of_an_image_is_ignored() -> None:
    app, _ = seeing_app()
    for detail, ignored in (("auto", None), ("high", "messages[0].content[0].image_url.detail")):
        part = {"type": "image_url", "image_url": {"url": URL, "detail": detail}}
        answer = post(app, CHAT, {"messages": user(part)})
        assert answer.headers.get("x-ignored-params") == ignored


def test_settings_of_the_processor_for_one_request() -> None:
    app, engine = seeing_app()
    for kwargs in ({"max_pixels": 9}, None):
        body = {"messages": user(OPENAI_PART), "mm_processor_kwargs": kwargs}
        assert post(app, CHAT, body).status_code == 200
        assert engine.preparer.kwargs == (kwargs or {})
    text_only = scripted_app(ScriptedEngine(["A"]), TEMPLATE)
    answer = post(text_only, CHAT, {"messages": user(WHAT), "mm_processor_kwargs": {"x": 1}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "mm_processor_kwargs")


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        ("/v1/completions", {"prompt": "a", "multi_modal_data": {"image": URL}}, None),
        (CHAT, {"messages": user(WHAT), "images": [PIXEL]}, None),
        (CHAT, {"messages": [{**user(WHAT)[0], "images": [PIXEL]}]}, "messages[0].images"),
        ("/api/chat", {"model": "bundled", "messages": [], "image_data": "x"}, None),
    ],
)
def test_what_would_be_answered_without_its_image(path, more, param) -> None:
    app, _ = seeing_app()
    answer = post(app, path, more)
    assert answer.status_code == 400
    param = param or next(name for name in more if name not in ("messages", "prompt", "model"))
    assert param in str(answer.json()["error"])


def test_empty_fields_of_media_say_nothing() -> None:
    app, _ = seeing_app()
    assert post(app, CHAT, {"messages": user(WHAT), "images": []}).status_code == 200


def test_the_limit_is_the_servers() -> None:
    app, _ = seeing_app(limit_mm_per_prompt={"image": 1})
    answer = post(app, CHAT, {"messages": user(OPENAI_PART, OPENAI_PART)})
    assert answer.json()["error"]["message"] == (
        "messages[0].content[1].image_url.url: is one image too many: a prompt can have 1 "
        "(limit_mm_per_prompt), this one has 2"
    )


def test_models_that_read_images_say_so() -> None:
    app, _ = seeing_app()
    [card] = talk(app, lambda client: client.get("/v1/models")).json()["data"]
    assert "vision" in card["capabilities"]
    assert "vision" in post(app, "/api/show", {"model": "bundled"}).json()["capabilities"]
    listed = talk(app, lambda client: client.get("/v1/models?client_version=1")).json()
    assert listed["models"][0]["input_modalities"] == ["text", "image"]


def test_the_log_of_requests_has_no_pixels() -> None:
    app, _ = seeing_app()
    post(app, CHAT, {"messages": user(OPENAI_PART)})
    log = talk(app, lambda client: client.get("/v1/requests"))
    assert PIXEL not in log.text
