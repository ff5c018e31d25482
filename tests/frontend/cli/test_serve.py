"""`quire serve` as a command: help, bad flags, a port in use, a missing model, signals."""

import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from quire.frontend.cli.serve import make_parser, served_models, split_name
from quire.frontend.engine_args import EngineArgs
from quire.ipc.errors import InvalidParameterError
from quire.tests.frontend.cli.command import interrupts_ignored
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


@pytest.mark.slow
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


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_and_its_engine(number: int) -> None:
    with running_server() as client:
        client.process.send_signal(number)
        assert client.process.wait(timeout=60) in (0, 130)
        assert "Traceback" not in client.log() and "again" not in client.log()


def test_an_ignored_interrupt_stays_ignored_and_the_server_says_so() -> None:
    with interrupts_ignored(), running_server() as client:
        [line] = [line for line in client.log().splitlines() if "SIGINT" in line]
        assert "no effect" in line and "SIGTERM ends it" in line
        for process in [client.process, *psutil.Process(client.process.pid).children()]:
            process.send_signal(signal.SIGINT)
        body = {"prompt": "Once", "max_tokens": 2}
        assert client.post("/v1/completions", json=body).status_code == 200
        client.process.terminate()
        assert client.process.wait(timeout=60) == 0
        assert "active requests" not in client.log() and "Traceback" not in client.log()


@pytest.mark.sampled(step=2)
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


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("small=org/name", ("small", "org/name")),
        ("small=./a=b", ("small", "./a=b")),
        ("org/name:Q4_K_M", ("org/name:Q4_K_M", "org/name:Q4_K_M")),
        ("./a=b", ("./a=b", "./a=b")),
        ("=x", ("=x", "=x")),
        ("x=", ("x=", "x=")),
    ],
)
def test_names_of_models(model: str, expected: tuple[str, str]) -> None:
    assert split_name(model) == expected


def served(*argv: str) -> dict[str, EngineArgs]:
    args = make_parser([]).parse(list(argv))
    arguments: dict[str, Any] = {
        name: getattr(args, name) for name in ("model", "dtype", "max_model_len") if name in args
    }
    return {model.name: model.args for model in served_models(args, arguments)}


def test_settings_of_several_models(tmp_path: Path) -> None:
    """Those of the command line are for all; those of the file are for one, and win."""
    file = tmp_path / "options.yaml"
    file.write_text("b:\n  max-model-len: 64\n  quantization: int8\n")
    models = served(
        *("a=./one", "b=./two", "./three", "--dtype", "float32", "--max-model-len", "128"),
        *("--model-options", str(file)),
    )
    assert {
        name: (args.model, args.dtype, args.max_model_len, args.quantization)
        for name, args in models.items()
    } == {
        "a": ("./one", "float32", 128, None),
        "b": ("./two", "float32", 64, "int8"),
        "./three": ("./three", "float32", 128, None),
    }
    assert [args.model for args in served("--keep-alive", "5m").values()] == ["bundled"]


@pytest.mark.parametrize(
    ("argv", "models", "aliases"),
    [
        (("m", "--served-model-name", "a", "b", "c"), ["m"], ["b", "c"]),
        (("--served-model-name", "a", "b", "--port", "1", "m"), ["m"], ["b"]),
        (("m", "--served-model-name", "a", "--served-model-name", "b"), ["m"], ["b"]),
        (("--served-model-name", "a", "m"), ["m"], []),
        (("--model", "m", "--served-model-name", "a", "b"), [], ["b"]),
        (("--served-model-name=a", "m"), ["m"], []),
    ],
)
def test_a_model_has_several_names(
    argv: tuple[str, ...], models: list[str], aliases: list[str]
) -> None:
    """As in vLLM; a model that stands behind its only name is still the model."""
    args = make_parser([]).parse(list(argv))
    assert (args.served_model_name, args.model, args.models) == ("a", "m", models)
    assert getattr(args, "model_aliases", []) == aliases


@pytest.mark.parametrize(
    ("argv", "text", "message"),
    [
        (("a=./x", "a=./y"), "", "a is there twice; NAME=MODEL renames one"),
        (("./x", "./y", "--served-model-name", "z"), "", "is for one model; with several, NAME="),
        (("./x", "./y", "--engine", "inproc"), "", "is for one model"),
        (("./x", "./y", "--model-aliases", "z"), "", "is for one model"),
        (("a=./x", "b=./y"), "c:\n  dtype: float32\n", "no model is called 'c'; there are: a, b"),
        (("a=./x", "b=./y"), "a: 5\n", "a must contain names and values"),
        (("a=./x", "b=./y"), "a:\n  dtyp: float32\n", "did you mean dtype"),
        (("a=./x", "b=./y"), "a:\n  model: z\n", "model"),
        (("a=./x", "b=./y"), "a:\n  max_model_len: -5\n", "max_model_len"),
    ],
)
def test_bad_settings_of_several_models(
    argv: tuple[str, ...], text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    options = ("--model-options", str(file)) if text else ()
    with pytest.raises(InvalidParameterError, match=message):
        served(*argv, *options)


@pytest.mark.slow
def test_a_missing_model_among_several_ends_the_server() -> None:
    done = quire_serve("bundled", "./no-such-model", "--port", "0")
    assert done.returncode == 2 and "no-such-model" in done.stderr.splitlines()[-1]
