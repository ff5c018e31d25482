"""A turn that is prepared: refusals before the engine is asked, tools as the model sees them."""

import asyncio

import pytest
from quire.frontend.answer_format import detect
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.turns.chat_turn import ChatTurn, prepare_chat, shape_answer
from quire.ipc.errors import InvalidParameterError
from quire.ipc.params import SamplingParams, StructuredOutputsParams
from quire.tests.frontend.server.turns.test_answer_run import (
    TOOLS,
    ScriptedEngine,
    run_turn,
    state_over,
)


def test_a_prompt_beyond_the_context_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        run_turn(ScriptedEngine([""]), messages=[{"role": "user", "content": "word " * 30}])
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    with pytest.raises(ApiError, match="requested"):
        run_turn(ScriptedEngine([""]), max_tokens=19)


def test_tools_of_a_model_without_them_are_refused() -> None:
    async def run() -> None:
        state = state_over(ScriptedEngine([""]), "a template without tools")
        turn = ChatTurn("r", [{"role": "user", "content": "hi"}], SamplingParams(), tools=TOOLS)
        await prepare_chat(state, HttpCall("req-1", 0.0, asyncio.current_task()), turn)

    with pytest.raises(InvalidParameterError) as caught:
        asyncio.run(run())
    assert caught.value.parameter == "tools"


@pytest.mark.parametrize(
    ("prefill", "reasoning", "content"),
    [
        ("<think>", "so.", "Yes."),
        ("<think>\nI think", " so.", "Yes."),
        ([{"type": "text", "text": "\n<think>Hm"}], " so.", "Yes."),
        ("<think>Hm.</think>\n\nIt is", "", " so.</think>Yes."),
        ("Is <think> a mark?", "", " so.</think>Yes."),
    ],
)
def test_an_answer_continues_in_the_reasoning_that_its_beginning_left_open(
    prefill: str | list, reasoning: str, content: str
) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": prefill}]
    answer = run_turn(
        ScriptedEngine([" so.", "</think>", "Yes."]),
        num_reasoning_tokens=int(bool(reasoning)),
        messages=messages,
        continue_final_message=True,
        add_generation_prompt=False,
    ).answer()
    assert (answer.reasoning, answer.content) == (reasoning, content)


STRICT = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
CHOICE = StructuredOutputsParams(choice=["a", "b"])


@pytest.mark.parametrize(
    ("turn", "asked", "holds", "ignored"),
    [
        (dict(), None, False, []),
        (dict(tools=TOOLS), None, False, []),
        (dict(tools=TOOLS, tool_choice="required"), None, True, []),
        (dict(tools=TOOLS, tool_choice={"name": "add"}), CHOICE, True, []),
        (dict(tools=STRICT), None, True, []),
        (dict(tools=STRICT, tool_choice="none"), None, False, []),
        (dict(tools=TOOLS), CHOICE, True, []),
        (dict(), CHOICE, True, []),
    ],
)
def test_the_shape_of_an_answer(
    turn: dict, asked: StructuredOutputsParams | None, holds: bool, ignored: list
) -> None:
    async def run() -> None:
        call = HttpCall("req-1", 0.0, asyncio.current_task())
        params = SamplingParams(structured_outputs=asked)
        shaped, _ = shape_answer(
            detect("<tool_call>"), ChatTurn("r", [], params, **turn), params, "", call
        )
        assert (shaped.structured_outputs is not None) is holds and call.ignored_params == ignored
        if not turn.get("tools"):
            assert shaped.structured_outputs is asked

    asyncio.run(run())


def test_unsupported_strict_tools_are_reported() -> None:
    async def run() -> None:
        call, params = HttpCall("req-1", 0.0, asyncio.current_task()), SamplingParams()
        turn = ChatTurn("r", [], params, tools=STRICT)
        assert shape_answer(detect("", "llama3_json"), turn, params, "", call)[0] is params
        assert call.ignored_params == ["tools.strict"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tools", "choice", "shown"),
    [(STRICT, "auto", TOOLS), (STRICT, "none", None), ([], "none", []), (None, "auto", None)],
)
def test_a_model_is_shown_neither_strict_nor_tools_that_it_may_not_use(
    tools: list | None, choice: str, shown: list | None
) -> None:
    turn = ChatTurn("r", [], SamplingParams(), tools=tools, tool_choice=choice)
    assert turn.shown_tools() == shown
