"""OpenAI's text completions out of messages: the n best, no token, offsets behind an echo."""

import asyncio
from types import SimpleNamespace
from typing import Any

from quire.frontend.answer_format import Content, detect
from quire.frontend.outputs import Logprob, RequestOutput
from quire.frontend.server.apis.completion_answer import CompletionAnswer
from quire.frontend.server.http.call import HttpCall
from quire.frontend.server.routes.completions import CompletionBody
from quire.frontend.server.turns.answer_run import AnswerRun, ChoiceDelta, FinishedChoice
from quire.frontend.server.turns.generation import GenerationJob
from quire.ipc.params import SamplingParams


def answer(num_runs: int = 1, gives_tokens: bool = True, **fields: Any) -> CompletionAnswer:
    async def run() -> CompletionAnswer:
        call = HttpCall("req-abc", 0.0, asyncio.current_task())
        state = SimpleNamespace(
            ready_engine=lambda: SimpleNamespace(tokenizer=None), system_fingerprint="fp_1"
        )
        jobs = [GenerationJob("r", [1, 2], SamplingParams(n=num_runs), "ab")]
        body = CompletionBody(prompt="x", **fields)
        made = AnswerRun(state, call, jobs, detect(None).parser)
        return CompletionAnswer(state, call, body, "m", made, gives_tokens=gives_tokens)

    return asyncio.run(run())


def message(index: int, text: str, *logprobs: float) -> FinishedChoice:
    positions = [{7: Logprob(logprob, 1, "c")} for logprob in logprobs]
    return FinishedChoice(index, [Content(text)], [7] * len(logprobs), positions, "stop")


def test_the_best_by_mean_log_probability_not_by_their_sum() -> None:
    made = [message(0, "long", *[-0.5] * 10), message(1, "bad", -3.0), message(2, "short", -0.4)]
    chosen = answer(3, n=2, best_of=3)._chosen(0, made)
    assert [(m.index, m.answer().content) for m in chosen] == [(0, "short"), (1, "long")]


def test_max_tokens_zero_returns_and_counts_no_token() -> None:
    asked = answer(gives_tokens=False, n=2, max_tokens=0)
    asked._run.usage.completion_tokens = 1
    streamed = asked._choices(ChoiceDelta(0, [Content("x")], [7], finish_reason="length"))
    for choices in (streamed, [asked._choice(m) for m in asked._chosen(0, [message(0, "x")])]):
        assert [(c.index, c.text, c.finish_reason) for c in choices] == [
            (0, "", "length"),
            (1, "", "length"),
        ]
    assert asked._usage().completion_tokens == 0


def test_offsets_count_from_the_start_of_the_echo() -> None:
    asked = answer(echo=True, logprobs=0)
    prompt = [None, {2: Logprob(-1.0, 1, "b")}]
    asked._run.outputs[0] = RequestOutput("r", None, [1, 2], [], True, prompt_logprobs=prompt)
    (choice,) = asked._whole_choices([message(0, "cc", -1.0, -1.0)])
    assert choice.text == "abcc"
    assert choice.logprobs.text_offset == [0, 0, 2, 3]
    assert choice.logprobs.token_logprobs == [None, -1.0, -1.0, -1.0]


def test_each_prompt_is_echoed_once_for_each_of_its_choices() -> None:
    """Also where no token is wanted: the engine then generates for one choice only."""
    asked = answer(gives_tokens=False, n=2, max_tokens=0, echo=True, stream=True)
    asked._run.jobs *= 2
    for prompt_index in (0, 1):
        asked._run.outputs[prompt_index] = RequestOutput("r", None, [1, 2], [], True)
        chunks = asked._beginning(prompt_index).split(b"\n\n")[:-1]
        assert [chunk.split(b'"index":')[1][:1] for chunk in chunks] == [
            b"%d" % (2 * prompt_index),
            b"%d" % (2 * prompt_index + 1),
        ]
        assert asked._beginning(prompt_index) == b""
