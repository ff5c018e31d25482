"""Turns, their answers, and a full context."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from quire import InvalidParameterError
from quire.frontend.cli.conversation import Conversation
from quire.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.tests.frontend.answer_format.grammars import marked_tokenizer
from quire.tests.frontend.answer_format.templates import TEMPLATES
from quire.tests.frontend.cli.talks import RecordingDisplay, conversation
from quire.tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


def test_turns_and_answers_are_remembered(model: Path) -> None:
    display = RecordingDisplay()
    with conversation(model, ignore_eos=True) as talk:
        talk.say("one", display)
        first = talk.messages[1]["content"]
        talk.say("two", display)
        assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2
        assert display.answers[:2] == [first, talk.messages[3]["content"]]
        assert talk.stats.num_turns == 2 and talk.stats.num_generated == 16
        assert talk.stats.num_prompt_tokens == len(talk._render(talk.messages[:3])[0])
        talk.regenerate(display)
        assert display.answers[2] == display.answers[1] and len(talk.messages) == 4
        talk.system = "Be brief."
        assert talk._render(talk.messages) != talk._render(talk.messages[2:])
        talk.clear()
        assert talk.messages == [] and talk.system == "Be brief."
        with pytest.raises(InvalidParameterError, match="there is no answer yet"):
            talk.regenerate(display)


def test_the_oldest_turns_are_dropped_when_the_context_is_full(model: Path) -> None:
    display = RecordingDisplay()
    with conversation(model) as talk:
        for i in range(12):
            talk.say(f"turn {i} " + "and words " * 3, display)
            assert talk.stats.num_prompt_tokens + 8 <= talk.context
        assert display.errors == []
        assert talk.messages[0]["content"].startswith("turn ")
        assert not talk.messages[0]["content"].startswith("turn 0")
        assert talk.messages[-2]["content"].startswith("turn 11")
        assert any("the oldest turn was dropped" in notice for notice in display.notices)
        assert talk.stats.num_dropped_turns == 12 - len(talk.messages) // 2
        # a turn that does not fit alone is refused, and drops no other turn
        before = list(talk.messages)
        with pytest.raises(InvalidParameterError, match="prompt"):
            talk.say("word " * 500, display)
        assert talk.messages == before
        talk.say("short", display)
        assert talk.messages[-2]["content"] == "short"


def test_a_truncated_answer_is_reported(model: Path) -> None:
    display = RecordingDisplay()
    with conversation(model, ignore_eos=True) as talk:
        talk.say("one", display)
    assert display.notices == ["the answer ended at max_tokens or at the end of the context"]


def test_reasoning_is_shown_and_not_remembered() -> None:
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    tokenizer = marked_tokenizer(marks)
    pieces = ["<|channel|>analysis<|mess", "age|>Hm.<|end|><|start|>assistant"]
    pieces += ["<|channel|>final<|message|>", "Yes", "."]
    asked, outputs = [], []

    def add_request(request_id: str, prompt: dict, params: object, lora_request: None) -> None:
        asked.append((tokenizer.decode(prompt["prompt_token_ids"]), params))
        for i, piece in enumerate(pieces):
            reason = "stop" if i == len(pieces) - 1 else None
            completion = CompletionOutput(0, piece, [i], finish_reason=reason)
            outputs.append(
                RequestOutput(request_id, None, [], [completion], bool(reason), RequestMetrics(0.0))
            )

    engine = SimpleNamespace(
        tokenizer=tokenizer,
        images=SimpleNamespace(reads_images=False, placeholder=None),
        config=SimpleNamespace(model_config=SimpleNamespace(max_model_len=1000)),
        add_request=add_request,
        has_unfinished_requests=lambda: bool(outputs),
        step=lambda: [outputs.pop(0)],
    )
    tokenizer.chat_templates["default"] = TEMPLATES["harmony"]
    display, talk = RecordingDisplay(), Conversation(engine, {}, None)  # type: ignore[arg-type]
    talk.say("one", display)
    talk.say("two", display)
    assert display.answers == ["Yes.", "Yes.", ""] and display.reasoning == "Hm.Hm."
    assert talk.messages[1] == {"role": "assistant", "content": "Yes."}
    (_, (prompt, params)) = asked
    said = "<|start|>assistant<|channel|>final<|message|>Yes.<|end|>"
    assert said in prompt and "Hm." not in prompt
    assert not params.skip_special_tokens and len(params.stop_token_ids) == 2
