"""Chat templates: render messages to the text of a prompt with the model's Jinja template.

Must not know: tokens, requests. A template comes with a model and is not trusted: it runs in
jinja2's sandbox on plain data, with limits on time and length (template_sandbox.py).
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ...ipc.errors import InvalidParameterError, ModelLoadError
from ...ipc.json_files import check_model_file, read_json_if_exists
from .chat_images import PlacedImage, images_of, with_literal, with_parts_for_images
from .chat_messages import INSTRUCTING, normalize_messages
from .template_traits import TemplateTraits, find_traits

# Marks the end of the last message. The trailing space shows whether the template trims the
# message.
CONTINUE_MARK = "\ue000continue\ue001 "
WITHOUT_TEMPLATE = (
    "it is a base model, or its template is missing. Let it continue a text, with `generate` or "
    "/v1/completions, or give a template, with `chat_template` or --chat-template FILE"
)
# A template that reads the parts of a content knows those of images.
MENTIONS_PARTS = "image"
# Limit on the CPU time of one rendering. A conversation of ten thousand messages takes 0.1 s.
TIME_LIMIT_S = 1.0


class ChatTemplateTimeError(InvalidParameterError):
    """Rendering the template exceeded its time limit."""


def read_chat_templates(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Returns the templates by name. The default template, if the model has one, is named
    "default".

    Files override tokenizer_config.json, as in transformers.
    """
    stated = (
        tokenizer_config.get("chat_template")
        or read_json_if_exists(directory / "chat_template.json").get("chat_template")
        or {}
    )
    templates: dict[str, str] = {}
    if isinstance(stated, str):
        templates = {"default": stated}
    else:
        try:
            templates = {str(entry["name"]): entry["template"] for entry in stated}
            is_valid = all(isinstance(template, str) for template in templates.values())
        except (TypeError, KeyError):
            is_valid = False
        if not is_valid:
            raise ModelLoadError(
                f"{directory}: chat_template must be a string, or a list of objects with `name` "
                f"and `template`"
            )
    for path in (
        directory / "chat_template.jinja",
        *sorted(directory.glob("additional_chat_templates/*.jinja")),
    ):
        if path.exists():
            check_model_file(path, directory)
            name = "default" if path.parent == directory else path.stem
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return templates


def choose_template(
    templates: dict[str, str], wanted: str | None, *, with_tools: bool = False
) -> str:
    """Returns the model's template named `wanted`, or `wanted` itself, or the model's default.

    Raises InvalidParameterError if there is none.
    """
    if wanted is not None:
        return templates.get(wanted, wanted)
    if with_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" not in templates:
        remedy = f"name one of {sorted(templates)}" if templates else WITHOUT_TEMPLATE
        raise InvalidParameterError(
            "chat_template", f"the model has no default chat template: {remedy}"
        )
    return templates["default"]


class RenderedChat(NamedTuple):
    """A conversation as the text of a prompt."""

    text: str
    images: list[PlacedImage]  # in the order of their placeholders in the text


def render_chat(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    """Returns the text of the prompt of a model that reads text only. `options`: see
    render_with_images.
    """
    return render_with_images(template, messages, None, **options).text


def render_with_images(
    template: str,
    messages: list[dict[str, Any]],
    placeholder: str | None,
    *,
    tools: list[dict] | None = None,
    documents: list[dict] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    variables: dict[str, Any] | None = None,
) -> RenderedChat:
    """Returns the text of the prompt, and its images.

    `placeholder` stands for an image where the template writes none; None: the model reads text
    only. `tools` is passed to the template as given: [] differs from None. With
    continue_final_message the text ends where the last message's content ends, so that the model
    continues it.

    Raises InvalidParameterError naming the place in `messages`, `tools` (if the template ignores
    them) or `chat_template`, with the template's own message if it raises one. Raises
    ChatTemplateTimeError after TIME_LIMIT_S, or after the remainder of the caller's time_limit.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidParameterError(
            "continue_final_message", "cannot be combined with add_generation_prompt"
        )
    messages = normalize_messages(messages, reads_images=placeholder is not None)
    if placeholder is not None:
        messages, tools, documents = with_literal([messages, tools, documents], placeholder)
    if (
        tools
        or MENTIONS_PARTS in template
        or any(
            message["role"] in INSTRUCTING
            or message.keys() & {"tool_calls", "reasoning_content"}
            or "content" not in message
            for message in messages
        )
    ):
        messages, tools = _adapted(template, messages, tools)
    if images := images_of(messages):
        traits = template_traits(template)
        messages = with_parts_for_images(
            messages, traits.image_roles, placeholder or "", traits.text_parts
        )
    if continue_final_message:
        messages[-1]["content"] = _with_mark(messages[-1].get("content") or "")
    text = _render(
        template,
        dict(
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **(variables or {}),
        ),
    )
    return RenderedChat(_cut_at_mark(text) if continue_final_message else text, images)


def _with_mark(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Returns a content with CONTINUE_MARK at the end of its text."""
    if isinstance(content, str):
        return content + CONTINUE_MARK
    *before, last = parts = content
    if last["type"] != "text":
        return [*parts, {"type": "text", "text": CONTINUE_MARK}]
    return [*before, {**last, "text": last["text"] + CONTINUE_MARK}]


def _render(template: str, variables: dict[str, Any]) -> str:
    import jinja2

    from .template_sandbox import TemplateTimeError, render, time_limit

    try:
        with time_limit(TIME_LIMIT_S):
            return render(template, variables)
    except TemplateTimeError as error:
        raise ChatTemplateTimeError("messages", f"the chat template {error} for them") from error
    except jinja2.TemplateSyntaxError as error:
        raise InvalidParameterError(
            "chat_template", f"is not valid Jinja: {error.message} (line {error.lineno})"
        ) from error
    except (MemoryError, OSError):  # of this process, not of the messages
        raise
    except Exception as error:  # a template can raise any exception
        raise InvalidParameterError(
            "messages", f"the chat template refuses them: {error!s:.1000}"
        ) from error


def _adapted(
    template: str, messages: list[dict[str, Any]], tools: list[dict] | None
) -> tuple[list[dict[str, Any]], list[dict] | None]:
    traits = template_traits(template)
    if tools and not traits.takes_tools:
        raise InvalidParameterError(
            "tools",
            "the model's chat template does not write tools into the prompt, so the model would "
            "never see them",
        )
    return traits.adapt(messages), traits.adapt_tools(tools)


def _cut_at_mark(text: str) -> str:
    mark = CONTINUE_MARK.strip()
    if mark not in text:
        raise InvalidParameterError(
            "continue_final_message", "the chat template does not write the last message's content"
        )
    head, _, tail = text.rpartition(mark)
    return head if tail.startswith(" ") else head.rstrip()


@lru_cache(maxsize=32)
def template_variables(template: str) -> frozenset[str]:
    """The names of the variables that the template reads; none if it is invalid."""
    from .template_sandbox import variables_of

    return variables_of(template)


@lru_cache(maxsize=32)
def template_traits(template: str) -> TemplateTraits:
    """Returns what the template supports of tools.

    An invalid template supports nothing; rendering reports the error.
    """

    from .template_sandbox import render, time_limit

    def try_out(messages: list[dict[str, Any]], tools: list[dict] | None) -> str:
        variables = dict(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=False,
            bos_token="",
            eos_token="",
        )
        return render(template, variables)

    # the result is cached, so it must not depend on the caller's remaining time
    with time_limit(TIME_LIMIT_S / 2, fresh=True):
        return find_traits(try_out)
