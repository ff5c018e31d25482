"""Output of a command: texts in the order of their prompts, JSON lines."""

from __future__ import annotations

import io
import json
import signal

import pytest
from quire import CompletionOutput, Logprob, RequestOutput
from quire.frontend.cli.terminal import Interrupts, JsonWriter, TextWriter
from quire.tests.frontend.cli.command import interrupts_ignored


def delta(text: str, finish_reason: str | None = None, index: int = 0) -> RequestOutput:
    completion = CompletionOutput(
        index=index, text=text, token_ids=[1], finish_reason=finish_reason
    )
    return RequestOutput("0", "prompt", [1, 2], [completion], finish_reason is not None)


def test_an_interrupt_is_a_request_to_stop_unless_it_is_ignored() -> None:
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with interrupts_ignored():
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert not interrupts.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_text_streams_in_the_order_of_the_prompts() -> None:
    out = io.StringIO()
    writer = TextWriter(["A", "B", "C"], [1, 1, 1], echo=False, out=out)
    writer.write(1, delta("b1 "))
    assert out.getvalue() == ""  # waits for its turn
    writer.write(0, delta("a1 "))
    assert out.getvalue() == "== 1/3 ==\na1 "  # streams
    writer.refuse(2, "too long")
    writer.write(1, delta("b2", "stop"))
    writer.write(0, delta("a2\n", "length"))
    assert out.getvalue() == "== 1/3 ==\na1 a2\n== 2/3 ==\nb1 b2\n"


def test_text_of_one_prompt_is_only_the_completion() -> None:
    out = io.StringIO()
    writer = TextWriter(["Once"], [1], echo=False, out=out)
    writer.write(0, delta(" upon", "stop"))
    assert out.getvalue() == " upon\n"
    out = io.StringIO()
    writer = TextWriter(["Once"], [1], echo=True, out=out)
    writer.write(0, delta(" upon"))
    writer.end()  # after an interrupt the shell's prompt must start on a new line
    assert out.getvalue() == "Once upon\n"


def test_several_completions_of_a_prompt_are_printed_in_order() -> None:
    out = io.StringIO()
    writer = TextWriter(["A", "B"], [2, 1], echo=True, out=out)
    writer.write(0, delta("two", "stop", index=1))
    writer.write(1, delta("b", "stop"))
    writer.write(0, delta("one", "stop"))
    assert out.getvalue() == "== 1/2, 1/2 ==\nAone\n== 1/2, 2/2 ==\nAtwo\n== 2/2 ==\nBb\n"
    writer = TextWriter(["A", "B"], [2, 1], echo=False, out=(out := io.StringIO()))
    writer.refuse(0, "n: too many")
    writer.write(1, delta("b", "stop"))
    assert out.getvalue() == "== 2/2 ==\nb\n"


def test_json_lines() -> None:
    out = io.StringIO()
    output = delta(" né", "stop")
    output.outputs[0].logprobs = [{7: Logprob(-2.0, 2, "x"), 1: Logprob(-0.5, 1, "y")}]
    output.outputs[0].cumulative_logprob = -0.5
    output.outputs.append(CompletionOutput(1, "b", [5], finish_reason="length"))
    output.prompt_logprobs = [None, {2: Logprob(-1.0, 1, "t")}]
    output.num_cached_tokens = 1
    writer = JsonWriter(out)
    writer.write(3, output)
    writer.refuse(4, "prompt: too long")
    first, beside, second = map(json.loads, out.getvalue().splitlines())
    assert (beside["index"], beside["completion"], beside["text"]) == (
        3,
        1,
        "b",
    ) and "prompt_logprobs" not in beside
    assert first["prompt_logprobs"] == [
        None,
        [{"token_id": 2, "logprob": -1.0, "rank": 1, "token": "t"}],
    ]
    assert first["cumulative_logprob"] == -0.5
    assert (
        first["index"] == 3
        and first["text"] == " né"
        and first["token_ids"] == [1]
        and first["finish_reason"] == "stop"
    )
    assert first["usage"] == {"prompt_tokens": 2, "completion_tokens": 1, "cached_tokens": 1}
    assert [entry["token_id"] for entry in first["logprobs"][0]] == [1, 7]
    assert second == {"index": 4, "error": "prompt: too long"}
