"""From a body of Anthropic's /v1/messages to a turn of a conversation.
May know: the fields and content blocks of that API, what chat templates expect of messages and tools.
Must not know: the answer's shape, HTTP."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...ipc.checks import INT64_MAX
from ...ipc.params import StructuredOutputsParams
from .call import Call
from .chat_run import ChatTurn, thinking_variables
from .errors import ApiError, invalid, missing, unsupported
from .sampling import SamplingBody, sampling_params
from .state import ServerState

# The house's names of what can be refused -> this API's.
NAMES = {"prompt": "messages", "stop": "stop_sequences", "structured_outputs": "output_config.format"}


class Block(msgspec.Struct, tag_field="type", kw_only=True):
    """What content is made of."""

    cache_control: dict[str, Any] | None = None  # for Anthropic's prompt cache; here every prefix is cached


class TextBlock(Block, tag="text"):
    text: str
    citations: list[Any] | None = None  # of an answer that is handed back: they are in its text


class SystemText(msgspec.Struct, kw_only=True):
    """Alone in its list: no other type has to be told from it, so msgspec would not ask for a tag."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None


class ThinkingBlock(Block, tag="thinking"):
    thinking: str = ""
    signature: str | None = None


class RedactedThinkingBlock(Block, tag="redacted_thinking"):
    """Written by another server's model in a form that only that one can read."""

    data: str | None = None


class ToolUseBlock(Block, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class ImageBlock(Block, tag="image"): ...


class DocumentBlock(Block, tag="document"): ...


class ToolResultBlock(Block, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


AnyBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | DocumentBlock


class SystemBlock(msgspec.Struct, kw_only=True):
    """A TextBlock, whose type need not be said: there is no other."""

    type: Literal["text"] = "text"
    text: str
    citations: list[Any] | None = None
    cache_control: dict[str, Any] | None = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(extra_json_schema={"enum": ["user", "assistant", "system"]})]
    content: str | list[AnyBlock]


class AnthropicTool(msgspec.Struct, kw_only=True):
    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None


class AnthropicToolChoice(msgspec.Struct, kw_only=True):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["auto", "any", "tool", "none"]})]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["enabled", "adaptive", "disabled"]})]
    budget_tokens: int | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["json_schema"]})]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: OutputFormat | None = None


class PromptBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    model: str | None = None
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | list[SystemBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None  # every prefix is cached


class MessagesBody(PromptBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, le=INT64_MAX)]
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64_MAX)] | None = None
    metadata: dict[str, Any] | None = None  # whom the request is for: changes no answer
    service_tier: str | None = None  # there is one


def turn_of(state: ServerState, call: Call, body: PromptBody, request_id: str) -> ChatTurn:
    """Raises ApiError, or InvalidParameterError under the house's names. max_tokens is cut to what the context leaves, as clients expect
    who have to send one."""
    is_run = isinstance(body, MessagesBody)
    sampling = SamplingBody()
    if is_run:
        sampling = SamplingBody(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k, stop=body.stop_sequences, stream=body.stream)
    defaults = state.ready_engine().get_default_sampling_params()
    structured = _structured_outputs(body.output_config)
    max_tokens = body.max_tokens if is_run else None
    params = sampling_params(sampling, defaults, state.server_config, max_tokens=max_tokens, logprobs=None, structured_outputs=structured)
    messages = _messages(body)
    continues = messages[-1]["role"] == "assistant"
    if continues and messages[-1].get("tool_calls"):
        raise invalid("messages", "messages: the last message calls tools; their tool_result blocks must follow in a user message.")
    tools, tool_choice = _tools(body)
    _note_ignored(call, body)
    return ChatTurn(
        request_id,
        messages,
        params,
        tools=tools,
        tool_choice=tool_choice,
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        template_variables=_variables(state, call, body),
        add_generation_prompt=not continues,
        continue_final_message=continues,
        names=NAMES,
    )


def _structured_outputs(config: OutputConfig | None) -> StructuredOutputsParams | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema":
        raise unsupported("output_config.format.type", "'output_config.format.type' must be json_schema.")
    return StructuredOutputsParams(json=config.format.schema)


def _note_ignored(call: Call, body: PromptBody) -> None:
    if body.thinking and body.thinking.budget_tokens is not None:
        call.ignored_params.append("thinking.budget_tokens")
    if isinstance(body, MessagesBody) and body.metadata:
        call.ignored_params.append("metadata")
    if isinstance(body, MessagesBody) and body.service_tier not in (None, "auto", "standard_only"):
        call.ignored_params.append("service_tier")


def _variables(state: ServerState, call: Call, body: PromptBody) -> dict[str, Any]:
    kind = body.thinking and body.thinking.type
    if kind not in (None, "enabled", "adaptive", "disabled"):
        raise unsupported("thinking.type", f"'thinking.type' must be enabled, adaptive or disabled, got '{kind:.40}'.")
    enabled = None if kind in (None, "adaptive") else kind == "enabled"
    effort = body.output_config and body.output_config.effort
    return thinking_variables(state, call, enabled, effort, ("thinking", "output_config.effort"))


# ------------------------------------------------------------ tools


def _tools(body: PromptBody) -> tuple[list[dict[str, Any]] | None, Any]:
    """In OpenAI's form, which chat templates know, and which of them is to be called."""
    tools = [_tool(tool, i) for i, tool in enumerate(body.tools or [])]
    names = [tool["function"]["name"] for tool in tools]
    if twice := [i for i, name in enumerate(names) if name in names[:i]]:
        raise invalid(f"tools[{twice[0]}].name", f"'tools[{twice[0]}].name': two tools are called {names[twice[0]]!r:.60}.")
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return tools or None, "auto"
    if choice.type == "none":
        return tools or None, "none"
    if choice.type not in ("any", "tool"):
        raise unsupported("tool_choice.type", f"'tool_choice.type' must be auto, any, tool or none, got '{choice.type:.40}'.")
    if not tools:
        raise invalid("tool_choice", f"'tool_choice' can be {choice.type} only with 'tools'.")
    if choice.type == "any":
        return tools, "required"
    if choice.name not in names:
        raise invalid("tool_choice.name", "'tool_choice.name' must be the name of one of 'tools'.")
    return tools, {"name": choice.name}


def _tool(tool: AnthropicTool, i: int) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        message = f"'tools[{i}]', {tool.type:.40}, is one of Anthropic's own; this server has only tools with a name and an input_schema."
        raise unsupported(f"tools[{i}].type", message)
    if not tool.name:
        raise missing(f"tools[{i}].name")
    if tool.input_schema is None:
        raise missing(f"tools[{i}].input_schema")
    described = {"description": tool.description} if tool.description else {}
    function = {"name": tool.name, **described, "parameters": tool.input_schema} | ({"strict": True} if tool.strict else {})
    return {"type": "function", "function": function}


# ------------------------------------------------------------ messages


def _messages(body: PromptBody) -> list[dict[str, Any]]:
    """As chat templates expect them: a result of a tool is a message, thoughts and calls belong to the message that they stand in.

    Turns of the same role that follow each other become one, as in Anthropic's API; many templates refuse two.
    """
    messages: list[dict[str, Any]] = []
    system = body.system if isinstance(body.system, str) else "\n".join(block.text for block in body.system or [])
    if system:
        messages.append({"role": "system", "content": system})
    if not body.messages:
        raise invalid("messages", "'messages' must hold at least one message.", "empty_array")
    names: dict[str, str] = {}  # of the tools, by the ids of their calls
    for i, message in enumerate(body.messages):
        if message.role not in ("user", "assistant", "system"):
            raise invalid(f"messages[{i}].role", f"'messages[{i}].role' must be user, assistant or system, got '{message.role:.40}'.")
        blocks = [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content
        for j, block in enumerate(blocks):
            _add(messages, message.role, block, f"messages[{i}].content[{j}]", names)
        if all(isinstance(block, RedactedThinkingBlock) for block in blocks):  # nothing that a template could write
            _last(messages, message.role)
    return messages


def _last(messages: list[dict[str, Any]], role: str) -> dict[str, Any]:
    """The message to add to: the last one if it is of this role, else a new one."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": ""})
    return messages[-1]


def _add(messages: list[dict[str, Any]], role: str, block: AnyBlock, where: str, names: dict[str, str]) -> None:
    if isinstance(block, TextBlock):
        message = _last(messages, role)
        message["content"] += ("\n" if message["content"] else "") + block.text
    elif isinstance(block, ThinkingBlock) and role == "assistant":
        message = _last(messages, role)
        message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
    elif isinstance(block, ToolUseBlock) and role == "assistant":
        names[block.id] = block.name
        call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        _last(messages, role).setdefault("tool_calls", []).append(call)
    elif isinstance(block, ToolResultBlock) and role == "user":
        if block.tool_use_id not in names:
            raise invalid(f"{where}.tool_use_id", f"'{where}.tool_use_id' must be the id of a tool_use block of an earlier message.")
        content = _result_text(block, where)
        messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "name": names[block.tool_use_id], "content": content})
    elif isinstance(block, (ImageBlock, DocumentBlock)):
        raise no_media(where, block)
    elif not isinstance(block, RedactedThinkingBlock):
        raise invalid(f"{where}.type", f"'{where}' cannot be a {block.__struct_config__.tag} block in a message of the role {role}.")


def _result_text(block: ToolResultBlock, where: str) -> str:
    parts = [TextBlock(text=block.content or "")] if not isinstance(block.content, list) else block.content
    for k, part in enumerate(parts):
        if not isinstance(part, TextBlock):
            raise no_media(f"{where}.content[{k}]", part)
    text = "\n".join(part.text for part in parts)
    return f"Error: {text}" if block.is_error and not text.lower().startswith("error") else text  # templates have no other way to say so


def no_media(where: str, block: Block) -> ApiError:
    return unsupported(f"{where}.type", f"'{where}' is of the type {block.__struct_config__.tag}: this model reads text only.")
