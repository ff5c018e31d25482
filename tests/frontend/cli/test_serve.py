"""`quire serve` as a command: help, bad flags, a port in use, a missing model, signals."""

import signal
import socket
import subprocess
import sys

import pytest
from quire.frontend.cli.serve import make_parser
from quire.tests.frontend.server.conftest import running_server


def quire_serve(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "quire", "serve", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_shows_ten_flags_and_help_all_the_rest() -> None:
    short, full = quire_serve("--help").stdout, quire_serve("--help-all").stdout
    assert "--port" in short and "--max-queued-requests" not in short
    assert "--max-queued-requests" in full and "--block-size" in full


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--prot", "1"), "did you mean --port?"),
        (("--port", "70000"), "--port"),
        (("--unknown-params", "maybe"), "--unknown-params"),
        (("--engine", "elsewhere"), "--engine"),
        (("a-model", "--model", "another"), "MODEL and --model are the same"),
    ],
)
def test_bad_flags_are_one_sentence(flags: tuple[str, ...], words: str) -> None:
    done = quire_serve(*flags)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = quire_serve("--port", str(taken.getsockname()[1]))
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(
        "quire: port: cannot listen on 127.0.0.1:"
    )


def test_a_missing_model_ends_the_server_with_its_name() -> None:
    done = quire_serve("./no-such-model", "--port", "0")
    assert (
        done.returncode == 2
        and "no-such-model" in done.stderr.splitlines()[-1]
        and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_its_engine(number: int) -> None:
    with running_server() as client:
        client.process.send_signal(number)
        assert client.process.wait(timeout=30) in (0, 130)
        assert "Traceback" not in client.log()


@pytest.mark.parametrize(
    ("flag", "value"), [("--chat-template", "missing.jinja"), ("--tool-call-parser", "mine")]
)
def test_flags_that_the_model_does_not_support_end_the_server(flag: str, value: str) -> None:
    done = quire_serve("--port", "0", flag, value)
    last = done.stderr.splitlines()[-1]
    assert (
        done.returncode == 2
        and last.startswith(f"quire: {flag[2:].replace('-', '_')}: must be")
        and value in last
    )


def test_model_as_a_flag() -> None:
    """Like vLLM's older command line."""
    for words in (["--model", "./m"], ["--port", "1", "--model=./m"], ["./m"]):
        assert make_parser([]).parse(words).model == "./m"
