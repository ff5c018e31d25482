"""One turn of a conversation: rendered, tokenized and checked, ready to run.

Must not know: the API of the request. The bodies of all chat APIs become a ChatTurn.

    ChatTurn ──prepare_chat──▶ AnswerRun
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec

from ....ipc.json_schemas import OPEN_KEYWORDS, closed_schema
from ....ipc.messages import ImageItem
from ....ipc.params import SamplingParams
from ...answer_format import AnswerFormat
from ...text.chat_images import images_of, num_characters_of
from ...text.chat_messages import normalize_messages
from ...text.chat_template import ChatTemplateTimeError, RenderedChat, template_variables
from ..admission import in_turn
from ..http.call import HttpCall
from ..http.errors import invalid, renaming
from ..state import ServerState
from .answer_run import AnswerRun
from .generation import GenerationJob, check_context, check_room
from .image_preparation import prepare_images
from .response_format import JsonOptions
from .tokenizing import LONG_TEXT, check_num_characters, tokenize_all

# A chat template may take this many seconds of processor time on the event loop.
INLINE_S = 0.05


@dataclass(slots=True)
class ChatTurn:
    """The parameters of a chat request in one form for all APIs.

    `tool_choice` is "auto", "none", "required" or the name of a function as {"name": ...}.
    """

    request_id: str
    messages: list[dict[str, Any]]
    params: SamplingParams
    max_tokens: int | None = None  # explicit limit; rejected if it exceeds the context
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    template_variables: dict[str, Any] = field(default_factory=dict)
    documents: list[dict[str, Any]] | None = None
    processor_kwargs: dict[str, Any] | None = None  # of images
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    priority: int = 0
    cache_salt: str | None = None
    names: dict[str, str] = field(
        default_factory=lambda: {"prompt": "messages", "multi_modal_data": "messages"}
    )
    json: JsonOptions = field(
        default_factory=JsonOptions
    )  # for call arguments constrained by a grammar
    # The API has a form for a call that max_tokens cuts, so a forced call need not wait for its
    # end.
    streams_calls: bool = False

    @property
    def wants_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def continued_text(self) -> str:
        """Returns the text of the message that the answer continues, or ""."""
        if not self.continue_final_message:
            return ""
        return normalize_messages(self.messages[-1:])[0].get("content", "")

    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Returns the tools as the model sees them, without `strict`, which concerns only the
        server.

        A template can tell an empty list from None, as in transformers.
        """
        if self.tools and self.tool_choice == "none":
            return None
        return self.tools and [
            tool | {"function": {k: v for k, v in tool["function"].items() if k != "strict"}}
            for tool in self.tools
        ]


def thinking_variables(
    state: ServerState,
    call: HttpCall,
    enabled: bool | None,
    effort: str | None,
    names: tuple[str, str],
) -> dict[str, Any]:
    """Returns the template variables for a model's optional reasoning and its effort; None stands
    for the template's default.

    `names` are the two fields of the body. A field that the model does not support is noted as
    ignored.
    """
    known = template_variables(state.template_text)
    switches = {"enable_thinking", "thinking"} & known
    variables: dict[str, Any] = {}
    if enabled is not None:
        variables = dict.fromkeys(sorted(switches), enabled)
        if not switches and enabled is not (state.answer_format.reasoning_marks is not None):
            call.ignored_params.append(names[0])
    if effort is not None and "reasoning_effort" in known:
        variables["reasoning_effort"] = _known_effort(state, call, effort, names[1])
    elif effort is not None and names[1] not in call.ignored_params:
        call.ignored_params.append(names[1])
    return variables


def _known_effort(state: ServerState, call: HttpCall, effort: str, name: str) -> str:
    """Returns the model's nearest level to `effort`. The field `name` is noted if it is another
    one.
    """
    marks = state.answer_format.reasoning_marks
    efforts = marks.efforts if marks is not None else ()
    if not efforts or effort in efforts:
        return effort
    if name not in call.ignored_params:
        call.ignored_params.append(name)
    return efforts[0] if effort in ("none", "minimal") else efforts[-1]


async def prepare_chat(state: ServerState, call: HttpCall, turn: ChatTurn) -> AnswerRun:
    """Renders, tokenizes and checks a turn.

    Raises ApiError or InvalidParameterError before the engine is called.
    """
    format, params = state.answer_format, turn.params
    text, token_ids, images = await render_turn(
        state, call, turn, must_fit=turn.params.truncate_prompt_tokens is None
    )
    params = format.adapt(params)
    check_context(state, token_ids, params, turn.names)
    check_room(state, token_ids, turn.max_tokens, turn.names)
    tools = turn.tools if turn.wants_tools else None
    before = format.prompt_before(text, turn.continued_text)
    params, names = shape_answer(format, turn, params, before, call)
    job = GenerationJob(
        *(turn.request_id, token_ids, params, text, turn.priority, turn.cache_salt, names, images)
    )
    make_parser = partial(
        format.parser,
        tools,
        prompt_text=before,
        continued=turn.continued_text,
        parallel_tool_calls=turn.parallel_tool_calls,
        calls_are_valid=turn.streams_calls and turn.tool_choice != "auto",
    )
    return AnswerRun(state, call, [job], make_parser)


def shape_answer(
    format: AnswerFormat, turn: ChatTurn, params: SamplingParams, text: str, call: HttpCall
) -> tuple[SamplingParams, dict[str, str]]:
    """Returns the parameters with the grammar that the turn requires, and the names of fields for
    errors of that grammar.
    """
    asked = params.structured_outputs
    options = {
        "parallel_tool_calls": turn.parallel_tool_calls,
        "prompt_text": text,
        "compact_json": turn.json.is_compact,
    }
    tools = _constrained(turn) if turn.wants_tools else []
    shape = format.forced(tools, turn.tool_choice, **options) if tools else None
    if shape is None and asked is not None:
        shape = format.after_reasoning(asked, tools=tools, **options)
        return msgspec.structs.replace(params, structured_outputs=shape), turn.names
    if shape is None:
        shape = format.strict(tools, **options)
    if shape is None:
        if any(tool["function"].get("strict") for tool in tools):
            # No marker shows where this model's calls begin.
            call.ignored_params.append(turn.names.get("strict", "tools.strict"))
        return params, turn.names
    return msgspec.structs.replace(params, structured_outputs=shape), turn.names | {
        "structured_outputs": "tools",
        "structured_outputs.grammar": "tools",
    }


def _constrained(turn: ChatTurn) -> list[dict[str, Any]]:
    """Returns the tools with the schemas that a grammar for their calls follows."""
    tools = []
    for tool in turn.tools or []:
        schema = tool["function"].get("parameters") or {}
        if turn.json.lists_properties:
            schema = closed_schema(schema)
        elif schema.get("properties") and not schema.keys() & OPEN_KEYWORDS:
            schema = {**schema, "additionalProperties": True}  # formats would close it
        tools.append({**tool, "function": {**tool["function"], "parameters": schema}})
    return tools


class RenderedTurn(NamedTuple):
    """The prompt of a turn."""

    text: str
    token_ids: list[int]  # with those of the images
    images: list[ImageItem]


async def render_turn(
    state: ServerState,
    call: HttpCall,
    turn: ChatTurn,
    *,
    must_fit: bool = False,
    add_special_tokens: bool = False,
) -> RenderedTurn:
    """Returns the prompt of a turn.

    Raises ApiError 400: with `must_fit` for a prompt that certainly exceeds the model's context,
    else for one that exceeds the limit of tokenizing.py.
    """
    tokenizer = state.ready_engine().tokenizer
    if tokenizer is None:
        raise invalid(
            turn.names["prompt"], "This model has no tokenizer, so it does not support chat."
        )
    if turn.wants_tools:
        state.answer_format.require_tools()

    placeholder = _placeholder(state, turn)

    def render() -> RenderedChat:
        return tokenizer.render_chat(
            turn.messages,
            placeholder,
            tools=turn.shown_tools(),
            documents=turn.documents,
            chat_template=state.chat_template,
            add_generation_prompt=turn.add_generation_prompt,
            continue_final_message=turn.continue_final_message,
            **(state.server_config.chat_template_kwargs | turn.template_variables),
        )

    num_characters = num_characters_of(turn.messages)
    if not must_fit:
        check_num_characters(num_characters, turn.names["prompt"], state.max_model_len)
    is_long = num_characters + 100 * (len(turn.messages) + len(turn.tools or ())) >= LONG_TEXT
    rendered = None if is_long else _render_at_once(render)
    if rendered is None:
        rendered = await in_turn(state.work_turns, call, render)
    if rendered.images:
        token_ids, items = await prepare_images(
            *(state, call, rendered.text, rendered.images, turn.names),
            add_special_tokens=add_special_tokens,
            processor_kwargs=turn.processor_kwargs,
        )
        return RenderedTurn(rendered.text, token_ids, items)
    [token_ids] = await tokenize_all(
        state,
        call,
        [rendered.text],
        add_special_tokens=add_special_tokens,
        param=turn.names["prompt"],
        must_fit=must_fit,
    )
    return RenderedTurn(rendered.text, token_ids, [])


def _placeholder(state: ServerState, turn: ChatTurn) -> str | None:
    """Returns what stands for an image in the prompt, None for a model that reads text only. Raises
    ApiError for too many images.
    """
    if not state.reads_images:
        return None
    inputs = state.ready_engine().images
    with renaming(turn.names):
        inputs.check_number(images_of(turn.messages))
    return inputs.placeholder


def _render_at_once(render: Callable[[], RenderedChat]) -> RenderedChat | None:
    """Returns the prompt, or None if the template takes so long that it would block the loop."""
    from ...text.template_sandbox import time_limit  # imports jinja2

    try:
        with time_limit(INLINE_S):
            return render()
    except ChatTemplateTimeError:
        return None
