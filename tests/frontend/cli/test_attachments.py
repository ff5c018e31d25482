"""Images in the conversation of the terminal: files, commands, what a terminal pastes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from quire import InvalidParameterError
from quire.frontend.cli.attachments import leading_images, read_image
from quire.frontend.cli.chat import talk_line_by_line
from quire.frontend.cli.chat_commands import Commands
from quire.frontend.cli.conversation import Conversation
from quire.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.tests.fake_images import ROWS, fake_inputs, with_vision
from quire.tests.frontend.cli.talks import RecordingDisplay, conversation
from quire.tests.frontend.tiny_tokenizers import text_config, tiny_tokenizer
from quire.tests.tiny_models import save_tiny_model

IMAGE = 299


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in ("a.png", "two words.PNG", "it's.png"):
        Image.new("RGB", (6, 4)).save(tmp_path / name)
    (tmp_path / "text.png").write_text("no image")
    return tmp_path


def test_an_image_is_read(files: Path) -> None:
    found = read_image(files / "a.png", "image")
    assert (found.name, found.size) == ("a.png", (6, 4))
    assert found.part["image_url"]["url"].startswith("data:image;base64,iVBORw0")


@pytest.mark.parametrize(
    ("name", "problem"),
    [("none.png", "is not a file"), ("text.png", "no image's"), (".", "a file")],
)
def test_other_files_are_refused(files: Path, name: str, problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=problem) as raised:
        read_image(files / name, "image")
    assert raised.value.parameter == "image"


@pytest.mark.parametrize(
    ("line", "names", "rest"),
    [
        ("DIR/a.png", ["a.png"], ""),
        ("DIR/a.png ", ["a.png"], ""),
        ("'DIR/two words.PNG' What is it?", ["two words.PNG"], "What is it?"),
        ('"DIR/two words.PNG"', ["two words.PNG"], ""),
        ("DIR/two\\ words.PNG 'DIR/a.png'  Both?", ["two words.PNG", "a.png"], "Both?"),
        ("DIR/it\\'s.png", ["it's.png"], ""),
        ("file://DIR/two%20words.PNG", ["two words.PNG"], ""),
        ("DIR/none.png What?", [], "DIR/none.png What?"),
        ("What is DIR/a.png?", [], "What is DIR/a.png?"),
        ("a.png", [], "a.png"),
        ("/help", [], "/help"),
        ("'DIR/a.png", [], "'DIR/a.png"),
        ("", [], ""),
    ],
)
def test_what_a_terminal_pastes(files: Path, line: str, names: list[str], rest: str) -> None:
    found, left = leading_images(line.replace("DIR", str(files)))
    assert [path.name for path in found] == names
    assert left == rest.replace("DIR", str(files))


class SeeingEngine:
    """Answers "Yes." to each request, and keeps the prompts."""

    def __init__(self) -> None:
        self.tokenizer = tiny_tokenizer()
        self.config = with_vision(text_config(max_model_len=200), IMAGE)
        self.images, self.preparer = fake_inputs(self.config, self.tokenizer)
        self.prompts: list[dict[str, Any]] = []
        self._outputs: list[RequestOutput] = []

    def add_request(self, request_id: str, prompt: dict[str, Any], *_: Any, **__: Any) -> None:
        self.prompts.append(prompt)
        answer = CompletionOutput(0, "Yes.", [1], finish_reason="stop")
        self._outputs = [RequestOutput(request_id, None, [], [answer], True, RequestMetrics(0.0))]

    def has_unfinished_requests(self) -> bool:
        return bool(self._outputs)

    def step(self) -> list[RequestOutput]:
        return [self._outputs.pop()]


@pytest.fixture
def commands() -> Iterator[Commands]:
    yield Commands(Conversation(SeeingEngine(), {}, None), RecordingDisplay())  # type: ignore[arg-type]


def test_an_image_goes_with_the_next_turn(commands: Commands, files: Path, tmp_path: Path) -> None:
    talk, display = commands.conversation, commands.display
    assert isinstance(display, RecordingDisplay) and isinstance(talk.engine, SeeingEngine)
    commands.run(f"/image '{files}/two words.PNG'")
    commands.run(f"/image {files}/two words.PNG")
    assert display.notices == 2 * [
        "(two words.PNG, 6 x 4 pixels, goes with the next message)",
    ]
    talk.say("What?", display)
    talk.say("Sure?", display)
    first, second = talk.engine.prompts
    for prompt in (first, second):
        assert prompt["prompt_token_ids"].count(IMAGE) == 2 * ROWS
        assert len(prompt["multi_modal_data"].items) == 2
    assert [message["role"] for message in talk.messages] == ["user", "assistant"] * 2
    assert [part["type"] for part in talk.messages[0]["content"]] == 2 * ["image_url"] + ["text"]
    commands.run(f"/save {tmp_path}/talk.json")
    saved = talk.messages
    commands.run("/clear")
    commands.run(f"/load {tmp_path}/talk.json")
    assert talk.messages == saved
    commands.run("/regenerate")
    assert talk.engine.prompts[-1] == second


def test_mistakes(commands: Commands, files: Path) -> None:
    for line, problem in (
        ("/image", "give a file"),
        (f"/image {files}/none.png", "is not a file"),
        (f"/image {files}/text.png", "no image's"),
    ):
        with pytest.raises(InvalidParameterError, match=problem):
            commands.run(line)
    commands.run(f"/image {files}/a.png")
    commands.run("/clear")
    commands.conversation.say("What?", commands.display)
    assert commands.conversation.messages[0]["content"] == "What?"


def test_a_model_that_reads_text_takes_no_image(files: Path, tmp_path: Path) -> None:
    with conversation(save_tiny_model(tmp_path / "tiny")) as talk:
        commands = Commands(talk, RecordingDisplay())
        with pytest.raises(InvalidParameterError, match="/image: this model reads text only"):
            commands.run(f"/image {files}/a.png")


def test_images_from_a_pipe(commands: Commands, files: Path, monkeypatch) -> None:
    lines = f"/image {files}/a.png\nWhat?\n/image {files}/none.png\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert talk_line_by_line(commands) == 2
    display = commands.display
    assert isinstance(display, RecordingDisplay)
    assert display.answers[0] == "Yes." and "is not a file" in display.errors[0]
    assert isinstance(commands.conversation.messages[0]["content"], list)
