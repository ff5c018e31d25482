"""Conversion of Ollama's bodies to turns: messages, options, formats, and refusals that name the
field.
"""

import asyncio
from typing import Any

import msgspec
import pytest
from quire.frontend.server.apis.ollama_turn import (
    CHAT_NAMES,
    GENERATE_NAMES,
    OllamaChatBody,
    OllamaGenerateBody,
    check_body,
    prepare_generate,
    prepare_ollama_chat,
    sampling,
)
from quire.frontend.server.config import ServerConfig
from quire.frontend.server.http.bodies import decode
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.http.errors import ApiError, renaming
from quire.frontend.server.state import ServerState
from quire.frontend.server.turns.answer_run import AnswerRun
from quire.ipc.params import RequestOutputKind, SamplingParams
from quire.tests.frontend.server.scripted import TOOL_TEMPLATE, ScriptedEngine, a_call

STATE = ServerState(ServerConfig(chat_template=TOOL_TEMPLATE), "scripted", ScriptedEngine([""]))
PLAIN_STATE = ServerState(ServerConfig(), "scripted", ScriptedEngine([""]))
USER = {"role": "user", "content": "hi"}


def prepared(
    body: dict[str, Any], state: ServerState = STATE, call: HttpCall | None = None
) -> AnswerRun:
    is_chat = "messages" in body

    async def run() -> AnswerRun:
        given = decode(
            msgspec.json.encode({"model": "bundled"} | body),
            OllamaChatBody if is_chat else OllamaGenerateBody,
        )[0]
        check_body(state, call or a_call(), given)
        with renaming(CHAT_NAMES if is_chat else GENERATE_NAMES):
            return await (prepare_ollama_chat if is_chat else prepare_generate)(
                state, call or a_call(), given, "id"
            )

    return asyncio.run(run())


def prompt(body: dict[str, Any]) -> str:
    return prepared(body).jobs[0].text


def test_a_conversation_with_a_tool() -> None:
    text = prompt(
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "thinking": "hm",
                    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}],
                },
                {"role": "tool", "tool_name": "add", "content": "3"},
            ],
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "add",
                        "description": "Adds.",
                        "parameters": {"type": "object"},
                    },
                }
            ],
        }
    )
    parts = [
        '"description": "Adds."',
        "system\nbe brief",
        "user\nhi",
        "<think>hm</think>",
        '{"name": "add", "arguments": {"a": 1}}',
        "tool\n3",
        "assistant\n",
    ]
    places = [text.index(part) for part in parts[:-1]] + [text.rindex(parts[-1])]
    assert places == sorted(places)


def test_generate_makes_a_conversation_or_uses_the_raw_prompt() -> None:
    assert (
        prompt({"prompt": "hi", "system": "be brief"}) == "<|im_start|>system\nbe "
        "brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt({"prompt": "hi", "system": "be brief", "raw": True}) == "hi"


def test_a_base_model_continues_the_prompt() -> None:
    base, call = ServerState(ServerConfig(), "scripted", ScriptedEngine([""])), a_call()
    base.template_text = ""
    run = prepared({"prompt": "Once upon", "system": "be brief"}, base, call)
    assert run.jobs[0].text == "Once upon"
    assert call.ignored_params == ["system"]


def test_a_last_message_of_the_assistant_is_continued() -> None:
    assert prompt({"messages": [USER, {"role": "assistant", "content": "Well,"}]}).endswith(
        "assistant\nWell,"
    )


def params(options: dict[str, Any], **fields: Any) -> SamplingParams:
    return sampling(STATE, msgspec.convert({"options": options, **fields}, OllamaChatBody))


def test_options() -> None:
    found = params(
        {
            "temperature": 0.5,
            "top_k": 3,
            "top_p": 0.9,
            "min_p": 0.1,
            "seed": 7,
            "stop": ["a"],
            "repeat_penalty": 1.1,
            "num_predict": 9,
        }
    )
    assert (found.temperature, found.top_k, found.top_p, found.min_p, found.seed, found.stop) == (
        0.5,
        3,
        0.9,
        0.1,
        7,
        ["a"],
    )
    assert (found.repetition_penalty, found.max_tokens, found.output_kind) == (
        1.1,
        9,
        RequestOutputKind.DELTA,
    )
    found = params(
        {"num_predict": -1, "seed": -1, "presence_penalty": 1, "frequency_penalty": 0.5},
        stream=False,
    )
    assert (found.max_tokens, found.seed, found.presence_penalty, found.frequency_penalty) == (
        None,
        None,
        1.0,
        0.5,
    )
    assert found.output_kind == RequestOutputKind.FINAL_ONLY


def test_formats() -> None:
    assert (
        params({}, format="").structured_outputs is None
        and params({}, format="json").structured_outputs.json_object
    )
    assert params({}, format={"type": "object"}).structured_outputs.json == {"type": "object"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "", "prompt": "hi"}, "model"),
        ({"model": "other:latest", "prompt": "hi"}, "model"),
        ({"messages": [USER | {"role": "robot"}]}, "messages[0].role"),
        ({"messages": [USER | {"images": ["aGk="]}]}, "messages[0].images"),
        ({"prompt": "hi", "images": ["aGk="]}, "images"),
        ({"prompt": "hi", "suffix": "x"}, "suffix"),
        ({"prompt": "hi", "template": "x"}, "template"),
        ({"prompt": "hi", "context": [1]}, "context"),
        ({"prompt": "hi", "format": "xml"}, "format"),
        ({"prompt": "hi", "options": {"top_p": 2}}, "options.top_p"),
        ({"prompt": "hi", "options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        ({"prompt": "word " * 600}, "prompt"),
        ({"prompt": "word " * 600, "raw": True}, "prompt"),
        ({"messages": [USER | {"content": "word " * 600}]}, "messages"),
    ],
)
def test_refusals_name_the_field(body: dict, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        prepared(body)
    assert caught.value.param == param


def test_think_is_ignored_for_a_model_without_reasoning() -> None:
    with pytest.raises(ApiError) as caught:
        prepared({"messages": [USER], "think": True}, PLAIN_STATE)
    assert caught.value.param == "think"
    assert prepared({"messages": [USER], "think": False}, PLAIN_STATE) and prepared(
        {"messages": [USER], "think": "high"}
    )


@pytest.mark.parametrize(("num_ctx", "ignored"), [(10**6, ["options.num_ctx"]), (512, [])])
def test_a_context_above_the_limit_is_ignored(num_ctx: int, ignored: list[str]) -> None:
    """Clients send one number for all models. Only a prompt that does not fit is an error."""
    call = a_call()
    assert prepared({"prompt": "hi", "options": {"num_ctx": num_ctx}}, call=call)
    assert call.ignored_params == ignored


def test_ignored_fields_are_reported() -> None:
    call = a_call()
    prepared(
        {
            "prompt": "hi",
            "think": "high",
            "keep_alive": "5m",
            "options": {"num_gpu": 1, "mirostat": 2, "top_k": 1},
        },
        STATE,
        call,
    )
    assert sorted(call.ignored_params) == [
        "keep_alive",
        "options.mirostat",
        "options.num_gpu",
        "think",
    ]
