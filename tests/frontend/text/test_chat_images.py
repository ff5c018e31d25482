"""Parts of images in messages: their forms, and what templates of different kinds make of them."""

from __future__ import annotations

from typing import Any

import pytest
from quire.frontend.text.chat_images import PlacedImage
from quire.frontend.text.chat_messages import normalize_messages
from quire.frontend.text.chat_template import RenderedChat, render_with_images, template_traits
from quire.ipc.errors import InvalidParameterError

PLACEHOLDER = "<image>"
# As Qwen's: parts anywhere.
PARTS = (
    "{% macro write(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{% if part.type == 'image' %}<img>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endmacro %}"
)
CALLS = "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
EVERYWHERE = (
    PARTS + "{% for m in messages %}[{{ m.role }}] {{ write(m.content) }}" + CALLS + "{% endfor %}"
)
# As Mistral's: parts of the user's messages only.
OF_USERS = (
    PARTS + "{% for m in messages %}[{{ m.role }}] {% if m.role == 'user' %}{{ write(m.content) }}"
    "{% else %}{{ m.content }}{% endif %}" + CALLS + "{% endfor %}"
)
TEXT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}" + CALLS + "{% endfor %}"
# As SmolVLM's: parts, and no text.
ONLY_PARTS = (
    "{% for m in messages %}[{{ m.role }}] {% for part in m.content %}{% if part.type == 'image' %}"
    "<img>{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
URL = {"type": "image_url", "image_url": {"url": "data:a"}}
ASKED = {"role": "user", "content": [URL, {"type": "text", "text": "What?"}]}
CALLED = [
    ASKED,
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]},
    {"role": "tool", "content": ["Seen: ", {"type": "image", "image": "data:b"}]},
]


def rendered(template: str, messages: list[dict[str, Any]], **options: Any) -> RenderedChat:
    return render_with_images(template, messages, PLACEHOLDER, **options)


@pytest.mark.parametrize(
    ("part", "image"),
    [
        (URL, PlacedImage("data:a", "messages[0].content[0].image_url.url")),
        (
            {"type": "image_url", "image_url": "data:a", "uuid": "u"},
            PlacedImage("data:a", "messages[0].content[0].image_url", "u"),
        ),
        ({"image_url": "data:a"}, PlacedImage("data:a", "messages[0].content[0].image_url")),
        (
            {"type": "input_image", "image_url": "data:a"},
            PlacedImage("data:a", "messages[0].content[0].image_url"),
        ),
        (
            {"type": "image", "image": b"\x89PNG"},
            PlacedImage(b"\x89PNG", "messages[0].content[0].image"),
        ),
        ({"type": "image", "url": "data:a"}, PlacedImage("data:a", "messages[0].content[0].url")),
        (
            {"type": "image_pil", "image_pil": 5},
            PlacedImage(5, "messages[0].content[0].image_pil"),
        ),
        ({"type": "image", "image": PlacedImage("a", "there")}, PlacedImage("a", "there")),
    ],
)
def test_forms_of_a_part(part, image) -> None:
    [message] = normalize_messages([{"role": "user", "content": [part]}], reads_images=True)
    assert message["content"] == [{"type": "image", "image": image}]


@pytest.mark.parametrize(
    ("role", "part", "place", "problem"),
    [
        ("user", {"type": "image_url"}, "content[0].image_url", "must be a URL, got None"),
        ("user", {"type": "image_url", "image_url": {}}, "content[0].image_url.url", "a URL"),
        ("user", {"type": "image_url", "image_url": b""}, "content[0].image_url", "a URL"),
        ("user", {"type": "image"}, "content[0].url", "must be an image, got None"),
        ("user", {"type": "image", "image": 1, "uuid": 5}, "content[0].uuid", "a string"),
        ("user", {"type": "input_image", "file_id": "f"}, "content[0].file_id", "OpenAI's"),
        ("user", {"type": "video"}, "content[0]", "text with its `text`, or an image"),
        ("assistant", URL, "content", "cannot have an image"),
        ("system", URL, "content", "cannot have an image"),
    ],
)
def test_refused_parts(role, part, place, problem) -> None:
    with pytest.raises(InvalidParameterError) as raised:
        normalize_messages([{"role": role, "content": [part]}], reads_images=True)
    assert raised.value.parameter == f"messages[0].{place}" and problem in raised.value.problem


def test_a_model_that_reads_text_refuses_images() -> None:
    for template in (EVERYWHERE, TEXT):
        with pytest.raises(InvalidParameterError, match=r"content\[0\]: .* reads text only"):
            render_with_images(template, [ASKED], None)


@pytest.mark.parametrize(
    ("template", "roles", "asked", "called"),
    [
        (EVERYWHERE, {"user", "tool"}, "<img>What?", "Seen: <img>"),
        (OF_USERS, {"user"}, "<img>What?", "Seen: \n<image>"),
        (TEXT, set(), "<image>\nWhat?", "Seen: \n<image>"),
    ],
)
def test_templates(template, roles, asked, called) -> None:
    assert template_traits(template).image_roles == roles
    text, images = rendered(template, CALLED)
    assert text.startswith(f"[user] {asked}[assistant] ") and text.endswith(f"[tool] {called}")
    assert [image.picture for image in images] == ["data:a", "data:b"]
    # a text stays a text
    assert rendered(template, [{"role": "user", "content": ["a", "b"]}]).text == "[user] a\nb"


def test_a_template_that_reads_parts_gets_texts_as_parts() -> None:
    text, images = rendered(ONLY_PARTS, [ASKED, {"role": "assistant", "content": "A cat."}])
    assert text == "[user] <img>What?[assistant] A cat." and len(images) == 1
    messages = [{"role": "user", "content": "a"}]
    assert render_with_images(ONLY_PARTS, messages, None).text == "[user] a"


def test_a_message_with_images_is_continued() -> None:
    for content, text in (
        ([URL, {"type": "text", "text": "Wha"}], "[user] <img>Wha"),
        ([{"type": "text", "text": "Wha"}, URL], "[user] Wha<img>"),
    ):
        messages = [{"role": "user", "content": content}]
        assert rendered(EVERYWHERE, messages, continue_final_message=True).text == text


ALTERNATING = EVERYWHERE.replace(
    "[{{ m.role }}]",
    "{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'user' or "
    "m.role == 'system' %}{{ raise_exception('no') }}{% endif %}[{{ m.role }}]",
)


def test_messages_that_become_one_keep_the_order_of_their_images() -> None:
    other = {"role": "user", "content": [{"type": "image", "image": "data:b"}]}
    for messages, text, pictures in (
        ([ASKED, other], "[user] <img>What?\n\n<img>", ["data:a", "data:b"]),
        ([other, ASKED], "[user] <img>\n\n<img>What?", ["data:b", "data:a"]),
        ([{"role": "system", "content": "Be brief."}, ASKED], "[user] Be brief.\n\n<img>What?", 1),
    ):
        found = rendered(ALTERNATING, messages)
        assert found.text == text
        if isinstance(pictures, list):
            assert [image.picture for image in found.images] == pictures
