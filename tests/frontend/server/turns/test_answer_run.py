"""A request, run: parts put together, finish reasons of the API, and the pieces of a stream."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest
from quire.frontend.answer_format import ParsedToolCall, detect
from quire.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.frontend.server.admission import Admission
from quire.frontend.server.held_pixels import HeldPixels
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.http.errors import ApiError
from quire.frontend.server.meters import Meters
from quire.frontend.server.request_log import RequestLog
from quire.frontend.server.turns import answer_run
from quire.frontend.server.turns.answer_run import AnswerRun, ChoiceDelta, FinishedChoice
from quire.frontend.server.turns.chat_turn import ChatTurn, prepare_chat
from quire.frontend.server.turns.generation import GenerationJob
from quire.frontend.text.chat_template import RenderedChat
from quire.ipc.params import SamplingParams

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


class ScriptedEngine:
    """Yields the given pieces as deltas."""

    def __init__(self, pieces: list[str], reason: str = "stop"):
        self.pieces, self.reason = pieces, reason
        self.tokenizer = SimpleNamespace(
            render_chat=lambda messages, placeholder, **_: RenderedChat(str(messages), []),
            encode=lambda text, special: [1] * len(text.split()),
        )

    async def generate(
        self, prompt: dict, params: SamplingParams, request_id: str, **_: object
    ) -> AsyncIterator[RequestOutput]:
        for i, piece in enumerate(self.pieces):
            is_last = i == len(self.pieces) - 1
            completion = CompletionOutput(
                0, piece, [i], finish_reason=self.reason if is_last else None
            )
            yield RequestOutput(
                request_id,
                None,
                prompt["prompt_token_ids"],
                [completion],
                is_last,
                RequestMetrics(0.0),
            )


def state_over(engine: ScriptedEngine, template: str = "<tool_call></think>") -> SimpleNamespace:
    config = SimpleNamespace(salt_per_key=False, chat_template_kwargs={})
    return SimpleNamespace(
        ready_engine=lambda: engine,
        server_config=config,
        max_model_len=20,
        reads_images=False,
        model_name="m",
        answer_format=detect(template),
        chat_template=None,
        ready_admission=lambda admission=Admission(8, 8, 100): admission,
        request_log=RequestLog(),
        meters=Meters(),
        held_pixels=HeldPixels(),
        running_ids=set(),
    )


def run_turn(
    engine: ScriptedEngine, num_reasoning_tokens: int = 0, **turn: object
) -> FinishedChoice:
    async def run() -> FinishedChoice:
        call = HttpCall("req-1", 0.0, asyncio.current_task())
        fields = {
            "request_id": "r",
            "messages": [{"role": "user", "content": "hi"}],
            "params": SamplingParams(),
        } | turn
        chat: AnswerRun = await prepare_chat(state_over(engine), call, ChatTurn(**fields))
        (message,) = await chat.messages()
        assert (
            chat.usage.completion_tokens == len(engine.pieces)
            and chat.usage.reasoning_tokens == num_reasoning_tokens
        )
        return message

    return asyncio.run(run())


def test_reasoning_content_and_a_call_are_separated() -> None:
    pieces = [
        "<think>we",
        "ll</think>\n\nlet me see ",
        '<tool_call>\n{"name": "add", "argu',
        'ments": {"a": 1}}\n</tool_call>',
    ]
    message = run_turn(ScriptedEngine(pieces), num_reasoning_tokens=1, tools=TOOLS)
    answer = message.answer()
    assert answer.reasoning.strip() == "well" and answer.content.strip() == "let me see"
    assert [(c.name, c.arguments) for c in answer.tool_calls] == [
        ("add", '{"a": 1}')
    ] and isinstance(answer.tool_calls[0], ParsedToolCall)
    assert message.finish_reason == "tool_calls" and message.token_ids == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("reason", "told"), [("stop", "stop"), ("length", "length"), ("abort", "length")]
)
def test_finish_reasons_are_the_apis(reason: str, told: str) -> None:
    assert run_turn(ScriptedEngine(["hello"], reason)).finish_reason == told


def test_truncated_reasoning_is_the_whole_answer() -> None:
    assert (
        run_turn(ScriptedEngine(["<think>a", "b c", " d"], "length"), num_reasoning_tokens=3)
        .answer()
        .content
        == ""
    )


def test_without_tools_a_mark_is_text() -> None:
    assert run_turn(ScriptedEngine(["<tool_call>x"])).answer().content == "<tool_call>x"


def test_a_running_turn_is_finished_while_the_server_drains() -> None:
    engine = ScriptedEngine(["<think>a</think>", "b"])
    state = state_over(engine)

    def refuse() -> None:
        raise ApiError(503, "The server is shutting down.")

    async def run() -> FinishedChoice:
        turn = ChatTurn(
            request_id="r", messages=[{"role": "user", "content": "hi"}], params=SamplingParams()
        )
        chat = await prepare_chat(state, HttpCall("req-1", 0.0, asyncio.current_task()), turn)
        message = FinishedChoice()
        async for delta in chat.deltas():
            state.ready_engine = refuse  # from the first token on
            message.add(delta)
        return message

    answer = asyncio.run(run()).answer()
    assert (answer.reasoning, answer.content) == ("a", "b")


def test_the_fast_path_of_plain_text_counts_like_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thought, then content of two pieces, then the end. Only plain content may take the fast
    path, and the counts do not depend on it.
    """
    texts = ("<think>a b", "</think>", "c", "d")
    said = [CompletionOutput(0, text, [7, 7]) for text in texts] + [
        CompletionOutput(0, "", [9], finish_reason="stop")
    ]
    outputs = [
        RequestOutput(
            "r",
            None,
            [1, 2],
            [completion],
            completion.finish_reason is not None,
            RequestMetrics(0.0),
        )
        for completion in said
    ]

    async def run(
        state: object,
        call: object,
        job: object,
        at_once: Callable[[RequestOutput], bool] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        for i, output in enumerate(outputs):
            if at_once is None or i == 0 or output.finished or not at_once(output):
                yield output

    async def counts(is_short: bool) -> tuple[list[str], int, int]:
        pieces: list[bytes] = []
        call = SimpleNamespace(push=lambda write, output: pieces.append(write(output)) or True)
        state = state_over(ScriptedEngine([]))
        jobs = [GenerationJob("r", [1, 2], SamplingParams())]
        answer = AnswerRun(state, call, jobs, lambda: state.answer_format.parser(None))
        around_text: dict[int, tuple[bytes, bytes]] = {}

        def write(delta: ChoiceDelta) -> bytes:
            if is_short:  # known from the first piece on
                around_text[0] = b"short ", b"."
            return "".join(part.text for part in delta.parts).encode()

        async for piece in answer.written(write, around_text):
            pieces.append(piece)
        said = [piece.decode() for piece in pieces]
        return said, answer.usage.completion_tokens, answer.usage.reasoning_tokens

    monkeypatch.setattr(answer_run, "run", run)
    pieces, *short = asyncio.run(counts(True))
    assert pieces[-2:] == ["c", 'short "d".'] and "short" not in "".join(pieces[:-2])
    long_pieces, *long = asyncio.run(counts(False))
    assert short == long and short[0] == 9 and 0 < short[1] < 9
    assert [*pieces[:-1], "d"] == long_pieces


def test_choices_of_several_prompts_have_indices_of_their_own() -> None:
    engine = ScriptedEngine(["a", "b"])

    async def run() -> list[tuple[int, str, str | None]]:
        jobs = [GenerationJob(f"r-{i}", [1] * i, SamplingParams()) for i in (1, 2)]
        call = HttpCall("req-1", 0.0, asyncio.current_task())
        answer = AnswerRun(state_over(engine), call, jobs, detect(None).parser)
        messages = await answer.messages()
        assert answer.usage.prompt_tokens == 3 and answer.usage.completion_tokens == 4
        return [(m.index, m.answer().content, m.finish_reason) for m in messages]

    assert asyncio.run(run()) == [(0, "ab", "stop"), (1, "ab", "stop")]
