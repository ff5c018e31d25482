"""Converts bodies of Ollama's /api/chat and /api/generate to a turn of a conversation, or to a raw
prompt.

Must not know: the format of the response, HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ....ipc.messages import ImageItem
from ....ipc.params import SamplingParams, StructuredOutputsParams
from ...answer_format import detect
from ...text.chat_images import base64_url, check_role, image_part, images_of, text_part
from ..http.bodies import checked, known_fields, sent_as
from ..http.call import HttpCall
from ..http.errors import invalid, missing, unsupported
from ..state import ServerState
from ..turns.answer_run import AnswerRun
from ..turns.chat_turn import ChatTurn, prepare_chat, thinking_variables
from ..turns.generation import GenerationJob, check_context
from ..turns.image_preparation import prepare_images
from ..turns.response_format import json_options
from ..turns.sampling import MAX_LOGPROBS, Number, sampling_params
from ..turns.tokenizing import tokenize_all

# Ollama's clients write this address before the name of a model from the hub.
HUB_ADDRESS = re.compile(r"^(https?://)?(hf\.co|huggingface\.co)/")
# SamplingParams have these options under the same names.
SAME = ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty")
CHAT_NAMES = {
    "prompt": "messages",
    "multi_modal_data": "messages",
    "structured_outputs": "format",
    "structured_outputs.json": "format",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    **{name: f"options.{name}" for name in (*SAME, "seed")},
}
GENERATE_NAMES = CHAT_NAMES | {"prompt": "prompt", "multi_modal_data": "images"}


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Ollama's options. Those before the comment have an effect."""

    num_predict: int | None = None  # below 1: to the end of the context
    num_ctx: int | None = None
    temperature: Number | None = None
    top_k: int | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    seed: int | None = None  # below 0: random
    stop: str | list[str] | None = None
    repeat_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    # These say how Ollama samples and runs its models. They are ignored.
    num_keep: int | None = None
    typical_p: Number | None = None
    tfs_z: Number | None = None
    repeat_last_n: int | None = None
    mirostat: int | None = None
    mirostat_tau: Number | None = None
    mirostat_eta: Number | None = None
    penalize_newline: bool | None = None
    numa: bool | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


IGNORED = OllamaOptions.__struct_fields__[OllamaOptions.__struct_fields__.index("num_keep") :]


class OllamaFunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: dict[str, Any]
    index: int | None = None


class OllamaToolCall(msgspec.Struct, kw_only=True):
    function: OllamaFunctionCall
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None  # in base64
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFunction(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(msgspec.Struct, kw_only=True):
    function: Annotated[dict[str, Any], sent_as(OllamaFunction)]
    type: str | None = None


class OllamaBody(msgspec.Struct, kw_only=True):
    """The fields shared by chat and generate."""

    model: str | None = None
    format: str | dict[str, Any] | None = None  # "json" or a schema
    options: OllamaOptions | None = None
    stream: bool | None = None  # true by default
    think: bool | str | None = None
    keep_alive: Number | str | None = None  # the model stays loaded while the server runs
    disable_any_whitespace: bool | None = None  # an extension of other servers
    disable_additional_properties: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    """POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[OllamaTool] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[str] | None = None  # in base64
    # rejected
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


def check_body(state: ServerState, call: HttpCall, body: OllamaBody) -> str:
    """Checks the common fields and returns the model name as requested.

    Names in Ollama's API may end in a tag. Fields without effect are noted.
    """
    if not body.model:
        raise missing("model")
    call.ignored_params += [
        f"options.{name}"
        for name in IGNORED
        if body.options and getattr(body.options, name) is not None
    ]
    if body.keep_alive is not None and not state.is_on_demand:
        call.ignored_params.append("keep_alive")
    state.select_model(plain_name(body.model, state.model_names), call)
    if body.think and state.answer_format.reasoning_marks is None:
        raise invalid(
            "think", f"The model {body.model!r:.60} does not reason: 'think' cannot be set."
        )
    context = body.options and body.options.num_ctx
    if context is not None and context > state.max_model_len:
        # Clients send one number for all models. A prompt that does not fit is refused by its size.
        call.ignored_params.append("options.num_ctx")
    return body.model


def sampling(state: ServerState, body: OllamaBody) -> SamplingParams:
    options = body.options or OllamaOptions()
    given = {name: getattr(options, name) for name in SAME} | {
        "seed": options.seed if (options.seed or 0) >= 0 else None,
        "repetition_penalty": options.repeat_penalty,
    }
    return sampling_params(
        state,
        given,
        json_options(body, state.server_config),
        max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs or body.top_logprobs else None,
        structured_outputs=_format(body.format),
        streams=body.stream is not False,
    )


def _format(format: str | dict[str, Any] | None) -> StructuredOutputsParams | None:
    if not format:
        return None
    if isinstance(format, dict):
        return StructuredOutputsParams(json=format)
    if format != "json":
        raise invalid("format", f"'format' must be \"json\" or a JSON schema, got {format!r:.40}.")
    return StructuredOutputsParams(json_object=True)


async def prepare_ollama_chat(
    state: ServerState, call: HttpCall, body: OllamaChatBody, request_id: str
) -> AnswerRun:
    messages = [
        _message(state, message, f"messages[{i}]") for i, message in enumerate(body.messages or ())
    ]
    turn = _turn(state, call, request_id, messages, sampling(state, body), body)
    if body.tools is not None:
        for i, tool in enumerate(body.tools):
            checked(tool.function, OllamaFunction, f"tools[{i}].function")
        turn.tools = [
            {"type": "function", "function": known_fields(tool.function, OllamaFunction)}
            for tool in body.tools
        ]
    return await prepare_chat(state, call, turn)


def _turn(
    state: ServerState,
    call: HttpCall,
    request_id: str,
    messages: list[dict[str, Any]],
    params: SamplingParams,
    body: OllamaBody,
) -> ChatTurn:
    """If the last message is the assistant's, the model continues it, as in Ollama."""
    thinks = None if body.think is None else bool(body.think)
    effort = body.think if isinstance(body.think, str) else None
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    return ChatTurn(
        request_id,
        messages,
        params,
        template_variables=thinking_variables(state, call, thinks, effort, ("think", "think")),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        json=json_options(body, state.server_config),
        names=CHAT_NAMES if isinstance(body, OllamaChatBody) else GENERATE_NAMES,
    )


def _message(state: ServerState, given: OllamaMessage, where: str) -> dict[str, Any]:
    if given.role not in ("system", "user", "assistant", "tool"):
        raise invalid(
            f"{where}.role",
            f"'{where}.role' must be system, user, assistant or tool, got {given.role!r:.40}.",
        )
    content = _content(state, given.content or "", given.images, f"{where}.images")
    check_role(given.role, content, f"{where}.images")
    message: dict[str, Any] = {"role": given.role, "content": content}
    if given.thinking:
        message["reasoning_content"] = given.thinking
    if given.tool_calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            | ({"id": call.id} if call.id else {})
            for call in given.tool_calls
        ]
    if given.tool_name:
        message["name"] = given.tool_name
    if given.tool_call_id:
        message["tool_call_id"] = given.tool_call_id
    return message


def _content(
    state: ServerState, text: str, images: list[str] | None, where: str
) -> str | list[dict[str, Any]]:
    """Returns the content of a message, whose images stand before its text, as in Ollama."""
    if not images:
        return text
    if not state.reads_images:
        raise unsupported(where, f"'{where}': this model reads text only.")
    parts = [image_part(base64_url(data), f"{where}[{i}]") for i, data in enumerate(images)]
    return [*parts, text_part(text)] if text else parts


async def prepare_generate(
    state: ServerState, call: HttpCall, body: OllamaGenerateBody, request_id: str
) -> AnswerRun:
    content = _content(state, body.prompt or "", body.images, "images")
    if body.suffix:
        raise unsupported(
            "suffix", "This model cannot fill in the middle: 'suffix' is not supported."
        )
    if body.template:
        raise unsupported(
            "template",
            "'template' is not supported in requests; with 'raw' the prompt is used unmodified.",
        )
    if body.context:
        raise unsupported("context", "'context' is not supported: /api/chat takes a conversation.")
    params = sampling(state, body)
    state.ready_engine()  # it is loaded, so its template is known
    if body.raw or not state.template_text:  # a base model continues the prompt
        if body.system and not body.raw:
            call.ignored_params.append("system")
        return await _prepare_raw(state, call, content, body.prompt or "", params, request_id)
    system = [{"role": "system", "content": body.system}] if body.system else []
    return await prepare_chat(
        state,
        call,
        _turn(
            state,
            call,
            request_id,
            [*system, {"role": "user", "content": content if body.images else body.prompt}],
            params,
            body,
        ),
    )


async def _prepare_raw(
    state: ServerState,
    call: HttpCall,
    content: str | list[dict[str, Any]],
    prompt: str,
    params: SamplingParams,
    request_id: str,
) -> AnswerRun:
    """Uses the prompt and the output unmodified, without a template. The prompt has a placeholder
    for each image of `content`.
    """
    items: list[ImageItem] | None = None
    if images := images_of([{"role": "user", "content": content}]):
        token_ids, items = await prepare_images(
            state, call, prompt, images, GENERATE_NAMES, add_special_tokens=True
        )
    else:
        [token_ids] = await tokenize_all(
            state, call, [prompt], param=GENERATE_NAMES["prompt"], must_fit=True
        )
    check_context(state, token_ids, params, GENERATE_NAMES)
    job = GenerationJob(request_id, token_ids, params, prompt, names=GENERATE_NAMES, images=items)
    return AnswerRun(state, call, [job], detect(None).parser)


def plain_name(name: str, known: Container[str] = ()) -> str:
    """Returns the name of a model without what Ollama's clients add: a tag `latest`, and the
    address of the hub. One of `known` keeps its address.
    """
    name = name.removesuffix(":latest")
    return name if name in known else HUB_ADDRESS.sub("", name)
