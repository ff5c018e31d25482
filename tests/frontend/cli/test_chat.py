"""`quire chat` as a command: on a terminal, and from a pipe."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from quire.tests.frontend.cli.command import LONG, Terminal, run

GREEDY = ("--temperature", "0", "--max-tokens", "12", "--stop", "\n")


def test_chat_from_a_pipe_remembers_until_clear(address: str) -> None:
    flags = ("--engine", address, *GREEDY)
    done = run(
        "chat",
        *flags,
        stdin="What is 2 + 3?\n\nWhat is 2 + 3?\n/clear\nWhat is 2 + 3?\n/exit\nnever said\n",
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, second, third = done.stdout.splitlines()
    assert first == third and second
    refused = run("chat", *flags, stdin="word " * 9000 + "\nWhat is 2 + 3?\n")
    assert refused.returncode == 2 and refused.stdout.splitlines() == [first]
    assert refused.stderr.startswith("quire: prompt") and refused.stderr.count("\n") == 1


@pytest.fixture
def state(tmp_path: Path) -> dict[str, str]:
    """Return environment variables that keep the history separate from the user's."""
    return {"XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm-256color"}


def test_ctrl_c_stops_the_answer_and_not_the_chat(address: str, state: dict[str, str]) -> None:
    greedy = ("--temperature", "0", *LONG)
    terminal = Terminal("chat", "--engine", address, *greedy, **state)
    terminal.wait_for("> ")
    terminal.type("Tell me a story.\r")
    # The answer has begun: before, the line editor would read the key.
    terminal.wait_for("Once")
    terminal.type("\x03")
    terminal.wait_for("\r\n> ")  # the answer may hold "> "
    terminal.type("half a turn\x03")
    terminal.wait_for("(Ctrl-D exits)")
    terminal.wait_for("> ")
    terminal.type("/clear\r")
    terminal.wait_for("a new conversation")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_turns_commands_and_history_on_a_terminal(
    address: str, state: dict[str, str], tmp_path: Path
) -> None:
    saved = tmp_path / "saved.json"
    terminal = Terminal("chat", "--engine", address, *GREEDY, **state)
    terminal.wait_for("/help lists the commands")
    terminal.wait_for("> ")
    terminal.type("/hepl\r")
    terminal.wait_for("quire: /hepl: there is no such command; did you mean /help?")
    terminal.wait_for("> ")
    # a pasted block with its newlines is one turn: nothing is sent before Enter
    terminal.type("\x1b[200~first line\nsecond line\n\x1b[201~third")
    terminal.wait_for("third")
    terminal.type("\x1b\r")  # Alt-Enter
    terminal.type("fourth\\\r")  # a backslash at the end
    terminal.type("fifth\r")
    terminal.wait_for("fifth")
    terminal.wait_for("> ")
    terminal.type("/regenerate\r")
    terminal.wait_for("> ")
    terminal.wait_for("> ")
    terminal.type(f"/save {saved}\r")
    terminal.wait_for("(1 turn saved in ")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    turn = "first line\nsecond line\nthird\nfourth\nfifth"
    messages = json.loads(saved.read_text())["messages"]
    assert [(message["role"], message["content"]) for message in messages[:1]] == [("user", turn)]
    assert len(messages) == 2

    history = tmp_path / "state" / "quire" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700
    assert "+second line" in history.read_text()
    again = Terminal("chat", "--engine", address, *GREEDY, **state)  # another session
    again.wait_for("> ")
    again.type("\x1b[A\x1b[A\x1b[A")  # above /save and /regenerate in the history
    again.wait_for("fifth")
    again.type("\x03\x04")
    assert again.exit_code() == 0
