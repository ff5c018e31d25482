"""`quire top` as a command: one observation as text or JSON, the live view in a terminal, and
servers that do not answer.
"""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from quire.frontend.cli.top import Server, ServerError
from quire.ipc.errors import InvalidParameterError
from quire.tests.browser.mock_server import Mock, serving
from quire.tests.frontend.cli import command


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    with serving(mock := Mock()) as mock.address:
        yield mock


@pytest.fixture(autouse=True)
def ready(mock: Mock) -> None:
    mock.mode = "ready"


def call(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    return command.call(capsys, "top", *arguments)


def test_one_observation_as_text(mock: Mock, capsys: pytest.CaptureFixture) -> None:
    mock.advance()
    mock.add(500, 64, 10_000)
    code, out, err = call(capsys, f"{mock.address}/v1")
    assert code == 0 and not err and "\x1b" not in out
    assert all(
        words in out
        for words in ("quire-demo", "output tokens/s", "KV cache", "blocks in use", "/500")
    )


def test_one_observation_as_json(mock: Mock, capsys: pytest.CaptureFixture) -> None:
    code, out, _ = call(capsys, mock.address, "--json")
    assert code == 0 and json.loads(out)["model"] == "quire-demo"


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("loading", "load weights, 42%"),
        ("dead", "The engine has stopped"),
        ("locked", "You didn't provide an API key."),
    ],
)
def test_servers_that_refuse(
    mock: Mock, capsys: pytest.CaptureFixture, mode: str, words: str
) -> None:
    mock.mode = mode
    code, out, err = call(capsys, mock.address)
    assert (
        code == 1
        and not out
        and err.count("\n") == 1
        and words in err
        and ("--api-key KEY" in err) is (mode == "locked")
    )
    with pytest.raises(ServerError) as caught:
        Server(mock.address).state()
    assert caught.value.is_loading is (mode == "loading")


def test_missing_and_foreign_servers(mock: Mock, capsys: pytest.CaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    code, _, err = call(capsys, f"127.0.0.1:{port}")
    assert (
        code == 1
        and err == f"quire: no server answers at http://127.0.0.1:{port}: Connection refused\n"
    )
    code, _, err = call(capsys, f"{mock.address}/elsewhere")
    assert code == 1 and "is not a Quire server: it answers /v1/engine/state with 404" in err


@pytest.mark.parametrize(
    "arguments", [["ftp://host"], ["--interval", "0"], ["--interval", "nan"], ["--colour"]]
)
def test_bad_arguments(capsys: pytest.CaptureFixture, arguments: list[str]) -> None:
    code, _, err = call(capsys, *arguments)
    assert code == 2 and err.count("\n") == 1


def test_the_key_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def urlopen(request, timeout):
        seen.append(request.get_header("Authorization"))
        raise OSError("enough")

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    for key in ("secret", None):
        with pytest.raises(ServerError, match="enough"):
            Server("http://host", key).state()
    assert seen == ["Bearer secret", None]
    with pytest.raises(InvalidParameterError):
        Server("file:///etc/passwd")


@pytest.mark.parametrize("leave", ["q", "Ctrl-C"])
def test_the_live_view_runs_until_the_user_quits(mock: Mock, leave: str) -> None:
    process, terminal = in_terminal(mock.address, "--interval", "0.1")
    try:
        read_until(terminal, b"output tokens/s")
        mock.mode = "dead"  # it polls again
        read_until(terminal, b"The engine has stopped")
        mock.mode = "ready"
        read_until(terminal, b"output tokens/s")
        if leave == "q":
            os.write(terminal, b"q")
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_the_live_view_without_a_server_is_one_sentence() -> None:
    process, terminal = in_terminal("http://127.0.0.1:1")
    try:
        assert (
            b"no server answers" in read_until(terminal, b"no server answers")
            and process.wait(60) == 1
        )
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def in_terminal(*arguments: str) -> tuple[subprocess.Popen, int]:
    """Run `quire top` with its own terminal. Return (the process, the other end of the
    terminal).
    """
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "quire", "top", *arguments]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(theirs)
    return process, ours


def read_until(terminal: int, words: bytes) -> bytes:
    seen, deadline = b"", time.monotonic() + 30
    while words not in seen:
        assert time.monotonic() < deadline, seen
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536)
    return seen
