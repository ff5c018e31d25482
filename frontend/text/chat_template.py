"""Chat templates: from messages to the text of a prompt, as the authors of the model wrote it down
in Jinja.

Must not know: tokens, requests. A template comes with a model and is not trusted: it runs in
jinja2's sandbox on plain data.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...ipc.errors import InvalidParameterError, ModelLoadError
from ...ipc.json_files import check_regular_file, read_json_if_exists
from .chat_messages import normalize_messages
from .template_traits import TemplateTraits, find_traits

if TYPE_CHECKING:
    import jinja2

# Marks where the last message ends. The trailing space shows whether the template trimmed the
# message.
CONTINUE_MARK = "\ue000continue\ue001 "


def read_chat_templates(directory: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Templates by name, "default" among them where the model has one.

    Files win over tokenizer_config.json, as in transformers.
    """
    stated = (
        tokenizer_config.get("chat_template")
        or read_json_if_exists(directory / "chat_template.json").get("chat_template")
        or {}
    )
    if isinstance(stated, str):
        templates = {"default": stated}
    else:
        templates = {entry["name"]: entry["template"] for entry in stated}
    for path in (
        directory / "chat_template.jinja",
        *sorted(directory.glob("additional_chat_templates/*.jinja")),
    ):
        if path.exists():
            check_regular_file(path)
            name = "default" if path.parent == directory else path.stem
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ModelLoadError(f"{path} cannot be read: {error}") from error
    return templates


def choose_template(
    templates: dict[str, str], wanted: str | None, *, with_tools: bool = False
) -> str:
    """The model's template called `wanted`, or `wanted` itself, or the model's own choice.

    InvalidParameterError if there is none.
    """
    if wanted is not None:
        return templates.get(wanted, wanted)
    if with_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" not in templates:
        names = f"; name one of {sorted(templates)}" if templates else ""
        raise InvalidParameterError(
            "chat_template", f"the model has no default chat template, so one must be given{names}"
        )
    return templates["default"]


def render_chat(
    template: str,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict] | None = None,
    documents: list[dict] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    variables: dict[str, Any] | None = None,
) -> str:
    """The prompt's text.

    `tools` reaches the template as given: [] is not None. With continue_final_message the text ends
    where the last message's content ends, so that the model continues it.

    Raises InvalidParameterError naming the place in `messages`, `tools` (of a template that ignores
    them) or `chat_template`, with the template's own words where it refuses.
    """
    import jinja2

    if add_generation_prompt and continue_final_message:
        raise InvalidParameterError(
            "continue_final_message", "cannot be combined with add_generation_prompt"
        )
    messages = normalize_messages(messages)
    if tools or any(
        "tool_calls" in message or message["role"] == "developer" for message in messages
    ):
        messages = _adapted(template, messages, with_tools=bool(tools))
    if continue_final_message:
        messages[-1]["content"] = (messages[-1].get("content") or "") + CONTINUE_MARK
    try:
        text = _compile(template).render(
            messages=messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **(variables or {}),
        )
    except jinja2.TemplateSyntaxError as error:
        raise InvalidParameterError(
            "chat_template", f"is not valid Jinja: {error.message} (line {error.lineno})"
        ) from error
    except Exception as error:  # a template can fail in any way that Python can
        raise InvalidParameterError(
            "messages", f"the chat template refuses them: {error}"
        ) from error
    return _cut_at_mark(text) if continue_final_message else text


def _adapted(
    template: str, messages: list[dict[str, Any]], *, with_tools: bool
) -> list[dict[str, Any]]:
    traits = template_traits(template)
    if with_tools and not traits.takes_tools:
        raise InvalidParameterError(
            "tools",
            "the model's chat template does not write tools into the prompt, so the model would "
            "never see them",
        )
    return traits.adapt(messages)


def _cut_at_mark(text: str) -> str:
    mark = CONTINUE_MARK.strip()
    if mark not in text:
        raise InvalidParameterError(
            "continue_final_message", "the chat template does not write the last message's content"
        )
    head, _, tail = text.rpartition(mark)
    return head if tail.startswith(" ") else head.rstrip()


@lru_cache(maxsize=32)
def template_traits(template: str) -> TemplateTraits:
    """What the template can do with tools.

    A template that is no Jinja can do nothing; what is wrong with it, rendering says.
    """

    def render(messages: list[dict[str, Any]], tools: list[dict] | None) -> str:
        return _compile(template).render(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=False,
            bos_token="",
            eos_token="",
        )

    return find_traits(template, render)


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    """jinja2's sandbox with what templates on the hub expect to find; the same as transformers'."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """{% generation %}…{% endgeneration %} marks the assistant's words for training; here it
        only lets them through.
        """

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(
                parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
            )

    class PlainNamespace(Namespace):
        """Python looks up names such as __html__ on any object, outside the sandbox: a namespace
        must not be able to hold one.
        """

        def __init__(*args: Any, **values: Any) -> None:
            for name in dict(*args[1:], **values):
                _refuse_private(name)
            Namespace.__init__(*args, **values)

        def __setitem__(self, name: str, value: Any) -> None:
            _refuse_private(name)
            super().__setitem__(name, value)

    def _refuse_private(name: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace must not hold the private name {name!r}")

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson  # jinja2's own escapes HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["namespace"] = PlainNamespace
    return environment
