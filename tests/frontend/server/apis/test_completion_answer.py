"""OpenAI's text completions from outputs: the n best, finish reasons, offsets after an echo."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from quire.frontend.outputs import CompletionOutput, RequestOutput
from quire.frontend.server.apis.completion_answer import (
    CompletionAnswer,
    CompletionChoice,
    finish_reason,
)
from quire.frontend.server.generation import Job
from quire.frontend.server.http.call import Call
from quire.frontend.server.routes.completions import CompletionBody
from quire.frontend.server.token_logprobs import CompletionLogprobs
from quire.ipc.params import SamplingParams


def answer(gives_tokens: bool = True, **fields: Any) -> CompletionAnswer:
    async def run() -> CompletionAnswer:
        call = Call("req-abc", 0.0, asyncio.current_task())
        state = SimpleNamespace(
            ready_engine=lambda: SimpleNamespace(tokenizer=None), system_fingerprint="fp_1"
        )
        return CompletionAnswer(
            state,
            call,
            CompletionBody(prompt="x", **fields),
            "m",
            [Job("r", [1, 2], SamplingParams())],
            gives_tokens=gives_tokens,
        )

    return asyncio.run(run())


def output(*completions: CompletionOutput) -> RequestOutput:
    return RequestOutput("r", None, [1, 2], list(completions), True)


def test_the_best_by_mean_log_probability_not_by_their_sum() -> None:
    made = [
        CompletionOutput(0, "long", [1] * 10, -5.0, finish_reason="stop"),
        CompletionOutput(1, "bad", [1], -3.0, finish_reason="stop"),
        CompletionOutput(2, "short", [1], -0.4, finish_reason="stop"),
    ]
    chosen = answer(n=2, best_of=3)._chosen(output(*made))
    assert [(c.index, c.text) for c in chosen] == [(0, "short"), (1, "long")]


@pytest.mark.parametrize(
    ("engines", "apis"), [("stop", "stop"), ("length", "length"), ("abort", "length"), (None, None)]
)
def test_finish_reasons_are_the_apis(engines: str | None, apis: str | None) -> None:
    assert finish_reason(CompletionOutput(0, "", [], finish_reason=engines)) == apis


def test_max_tokens_zero_returns_and_counts_no_token() -> None:
    asked = answer(gives_tokens=False, n=2, max_tokens=0)
    made = output(CompletionOutput(0, "x", [7], finish_reason="length"))
    asked._count(0, made)
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in asked._chosen(made)] == [
        (0, "", [], "length"),
        (1, "", [], "length"),
    ]
    assert asked._usage.counts().completion_tokens == 0 and asked._usage.counts().prompt_tokens == 2


def test_offsets_count_from_the_start_of_the_echo() -> None:
    choice = CompletionChoice(
        text="cd", index=0, logprobs=CompletionLogprobs([0, 1], [-1.0, -1.0], ["c", "d"], [{}, {}])
    )
    echo = CompletionChoice(
        text="ab",
        index=0,
        logprobs=CompletionLogprobs([0, 1], [None, -1.0], ["a", "b"], [None, {}]),
    )
    answer()._put_before(choice, echo)
    assert (
        choice.text == "abcd"
        and choice.logprobs.text_offset == [0, 1, 2, 3]
        and choice.logprobs.tokens == list("abcd")
    )
