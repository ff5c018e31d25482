"""The commands of a conversation: their effects and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire import InvalidParameterError
from quire.frontend.cli.chat_commands import COMMANDS, Commands
from quire.tests.frontend.cli.talks import RecordingDisplay, conversation
from quire.tests.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with conversation(save_tiny_model(tmp_path_factory.mktemp("tiny"))) as talk:
        yield Commands(talk, RecordingDisplay())


@pytest.fixture(autouse=True)
def fresh(commands: Commands) -> None:
    commands.display = RecordingDisplay()
    commands.conversation.clear()
    commands.conversation.set_system(None)


def displayed(commands: Commands) -> str:
    return "\n".join(commands.display.notices)  # type: ignore[attr-defined]


def test_help_names_every_command(commands: Commands) -> None:
    commands.run("/help")
    assert all(usage in displayed(commands) for _, usage, _ in COMMANDS.values())


def test_sampling_parameters_are_shown_and_set(commands: Commands) -> None:
    commands.run("/set temperature 0.5")
    commands.run("/set top-p 0.9")
    commands.run("/set stop END")
    commands.run("/set")
    sampling = commands.conversation.sampling
    assert (sampling["temperature"], sampling["top_p"], sampling["stop"]) == (0.5, 0.9, ["END"])
    assert "temperature = 0.5" in displayed(commands) and "max_tokens = 8" in displayed(commands)
    commands.run("/set temperature 0")


def test_system_message(commands: Commands) -> None:
    commands.run("/system  Be brief. ")
    assert commands.conversation.system == "Be brief."
    commands.run("/system")
    assert displayed(commands).count("system: Be brief.") == 2
    commands.run("/system none")
    assert commands.conversation.system is None


def test_save_load_regenerate_clear_and_exit(commands: Commands, tmp_path: Path) -> None:
    talk, path = commands.conversation, tmp_path / "talk.json"
    commands.run("/system Be brief.")
    talk.say("one", commands.display)
    messages = list(talk.messages)
    commands.run(f"/save {path}")
    commands.run(f"/save {path}")  # overwrites the file that it wrote itself
    commands.run("/clear")
    commands.run("/system none")
    commands.run(f"/load {path}")
    assert talk.messages == messages and talk.system == "Be brief."
    commands.run("/regenerate")
    assert talk.messages == messages  # greedy
    commands.run("/stats")
    assert "turns: " in displayed(commands) and "tokens/s" in displayed(commands)
    assert list(tmp_path.iterdir()) == [path]
    assert not commands.is_over
    commands.run("/exit")
    assert commands.is_over
    commands.is_over = False


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/hepl", "/hepl: there is no such command; did you mean /help?"),
        ("/frobnicate", "/frobnicate: there is no such command; /help lists the commands"),
        ("/ help", "there is no such command"),
        ("/", "there is no such command"),
        ("/clear now", "/clear: takes no argument, got 'now'"),
        ("/set temperatur 1", "no such sampling parameter; did you mean temperature?"),
        ("/set seed 1", "no such sampling parameter; it is one of"),
        ("/set temperature", "temperature: give a value: /set temperature VALUE"),
        ("/set temperature hot", "temperature: must be a number, got 'hot'"),
        ("/set temperature -1", "temperature: must be 0 (greedy) or greater"),
        ("/set n 2", "n: a conversation has one answer per turn"),
        ("/save", "/save: give a file: /save FILE"),
        ("/load", "/load: give a file: /load FILE"),
        ("/load ./none.json", "/load: none.json is not a file"),
        ("/save ./none/talk.json", "/save: cannot write none/talk.json: No such file"),
        ("/regenerate", "/regenerate: there is no answer yet"),
    ],
)
def test_mistakes_are_one_sentence_and_change_nothing(
    line: str, problem: str, commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(commands.conversation.sampling)
    with pytest.raises(InvalidParameterError) as caught:
        commands.run(line)
    assert problem in str(caught.value) and "\n" not in str(caught.value)
    assert commands.conversation.sampling == before and commands.conversation.messages == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"messages": 3}',
        '{"messages": [{"role": "user", "content": "a"}]}',
        '{"messages": [{"role": "user"}, {"role": "assistant"}]}',
        '{"messages": [], "system": 3}',
        "[" * 100_000,
    ],
)
def test_other_files_are_not_loaded_and_not_overwritten(
    content: str, commands: Commands, tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    for command in ("/load", "/save"):
        with pytest.raises(InvalidParameterError, match="is not a conversation written by /save"):
            commands.run(f"{command} {path}")
    assert path.read_text() == content


def test_a_saved_conversation_is_plain_json(commands: Commands, tmp_path: Path) -> None:
    commands.conversation.messages = [
        {"role": "user", "content": "grüße\n"},
        {"role": "assistant", "content": "好"},
    ]
    commands.run(f"/save {tmp_path / 'talk.json'}")
    saved = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))
    assert saved == {"system": None, "messages": commands.conversation.messages}
