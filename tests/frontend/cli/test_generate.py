"""`quire generate` as a process: prompt sources, streams, exit codes, Ctrl-C and pipes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from quire import InvalidParameterError, StructuredOutputsParams
from quire.frontend.cli import generate
from quire.frontend.cli.generate import read_prompts
from quire.tests.frontend.cli.command import (
    LONG,
    ONE_THREAD,
    QUIRE,
    STORY,
    Terminal,
    call,
    json_lines,
    run,
)


def prompts_of(*words: str, stdin: bytes = b"", monkeypatch: pytest.MonkeyPatch) -> list:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    return read_prompts(generate.make_parser([]).parse(list(words)))


def test_prompts_from_arguments_and_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prompts_of("a", "-", "b", stdin=b"two\nlines\n", monkeypatch=monkeypatch) == [
        ("a", {}),
        ("two\nlines", {}),
        ("b", {}),
    ]
    assert prompts_of(stdin="grüße".encode(), monkeypatch=monkeypatch) == [("grüße", {})]
    with pytest.raises(InvalidParameterError, match="standard input is empty"):
        prompts_of(stdin=b"\n", monkeypatch=monkeypatch)
    with pytest.raises(InvalidParameterError, match="standard input is not UTF-8"):
        prompts_of(stdin=b"\xff\xfe", monkeypatch=monkeypatch)


def test_prompts_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("first\n\n  second\n")
    assert prompts_of("zero", "--file", str(lines), monkeypatch=monkeypatch) == [
        ("zero", {}),
        ("first", {}),
        ("  second", {}),
    ]
    records = tmp_path / "prompts.jsonl"
    records.write_text('{"prompt": "a", "max_tokens": 3}\n{"prompt_token_ids": [1, 2]}\n')
    expected = [("a", {"max_tokens": 3}), ({"prompt_token_ids": [1, 2]}, {})]
    special = tmp_path / "special.jsonl"
    special.write_text(
        '{"prompt": "a", "logit_bias": {"5": 1}, "structured_outputs": {"regex": "x+"}}\n'
    )
    wanted = {"logit_bias": {5: 1.0}, "structured_outputs": StructuredOutputsParams(regex="x+")}
    assert prompts_of("--file", str(special), monkeypatch=monkeypatch) == [("a", wanted)]
    assert prompts_of("--file", str(records), monkeypatch=monkeypatch) == expected
    assert (
        prompts_of("--file", "-", stdin=records.read_bytes(), monkeypatch=monkeypatch) == expected
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", 'must be an object with "prompt"'),
        ('{"text": "a"}', 'must be an object with "prompt"'),
        ('{"prompt": "a", "prompt_token_ids": [1]}', 'must be an object with "prompt"'),
        ('{"prompt": "a", "temprature": 1}', "unknown key 'temprature'"),
        ('{"prompt": "a", "max_tokens": "many"}', "max_tokens: Expected `int"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias: Expected `int"),
        (
            '{"prompt": "a", "structured_outputs": {"regexp": "x"}}',
            "structured_outputs: has no 'regexp'; it has json, regex, ",
        ),
        (
            '{"prompt": "a", "structured_outputs": {}}',
            "structured_outputs: must give exactly one of",
        ),
        ('{"prompt": "a", "structured_outputs": "x"}', "structured_outputs: Expected `object"),
        ("", "holds no prompt"),
    ],
)
def test_a_bad_line_of_a_file_is_named(
    line: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = tmp_path / "prompts.jsonl"
    records.write_text(line)
    with pytest.raises(InvalidParameterError) as caught:
        prompts_of("--file", str(records), monkeypatch=monkeypatch)
    assert problem in str(caught.value)


@pytest.mark.parametrize("words", [('""',), ('""', '""'), ("--file", "empty.jsonl")])
def test_empty_prompts_are_refused_before_an_engine_is_loaded(
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def load(*_: object) -> None:
        raise AssertionError("an engine was loaded")

    monkeypatch.setattr(generate, "open_engine", load)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text('{"prompt": ""}\n')
    given = [word.strip('"') for word in words]
    assert call(capsys, "generate", *given) == (2, "", "quire: prompt: must not be empty\n")


# ---------------------------------------------------------------- with an engine


def test_text_and_json_have_the_same_content(address: str) -> None:
    flags = ("--engine", address, "--temperature", "0", "--max-tokens", "8", "--ignore-eos")
    text = run("generate", STORY, *flags)
    assert (text.returncode, text.stderr) == (0, "")
    (line,) = json_lines(run("generate", STORY, "--json", *flags))
    assert text.stdout.removesuffix("\n") == line["text"].removesuffix("\n")
    assert (
        line["prompt"] == STORY
        and line["finish_reason"] == "length"
        and len(line["token_ids"]) == 8
    )
    assert line["usage"]["completion_tokens"] == 8 and line["usage"]["prompt_tokens"] > 1


def test_several_completions_are_all_printed(address: str) -> None:
    flags = ("--engine", address, "--seed", "3", "--n", "3", "--max-tokens", "8", "--ignore-eos")
    text = run("generate", STORY, *flags)
    assert (text.returncode, text.stderr) == (0, "")
    lines = json_lines(run("generate", STORY, "--json", *flags))
    assert [line["completion"] for line in lines] == [0, 1, 2] and len(
        {line["text"] for line in lines}
    ) == 3
    printed = "".join(
        f"== 1/1, {k + 1}/3 ==\n{line['text']}" + "\n" * (not line["text"].endswith("\n"))
        for k, line in enumerate(lines)
    )
    assert text.stdout == printed


def test_an_in_process_engine_gives_the_daemons_tokens(
    address: str, capsys: pytest.CaptureFixture
) -> None:
    flags = ["generate", STORY, "--json", "--seed", "7", "--max-tokens", "12", "--engine"]
    code, out, _ = call(capsys, *flags, "inproc", *ONE_THREAD)
    (line,) = json_lines(run(*flags, address))
    assert code == 0 and json.loads(out)["token_ids"] == line["token_ids"]


def test_prompts_of_a_file_run_together_and_a_refused_one_fails_alone(
    address: str, tmp_path: Path
) -> None:
    records = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": STORY, "max_tokens": 3},
        {"prompt": "word " * 9000},
        {"prompt": "x", "top_p": 3},
        {"prompt_token_ids": [300, 301]},
    ]
    records.write_text("\n".join(map(json.dumps, lines)))
    done = run(
        "generate",
        "--file",
        str(records),
        "--engine",
        address,
        "--json",
        "--max-tokens",
        "5",
        "--ignore-eos",
    )
    assert done.returncode == 2
    by_index = {line["index"]: line for line in json_lines(done)}
    assert len(by_index[0]["token_ids"]) == 3 and len(by_index[3]["token_ids"]) == 5
    assert by_index[1]["error"].startswith("prompt") and by_index[2]["error"].startswith("top_p")
    assert (
        "quire: prompt 2: " in done.stderr
        and "quire: prompt 3: top_p: must be" in done.stderr
        and done.stderr.count("\n") == 2
    )


def test_several_prompts_in_order_and_one_from_standard_input(address: str) -> None:
    done = run(
        "generate",
        "one",
        "-",
        "--echo",
        "--engine",
        address,
        "--max-tokens",
        "4",
        "--ignore-eos",
        stdin="two",
    )
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if line.startswith("== ")] == [
        "== 1/2 ==",
        "== 2/2 ==",
    ]
    assert done.stdout.index("\none") < done.stdout.index("\ntwo")


def test_ctrl_c_ends_generate_with_130(address: str) -> None:
    with subprocess.Popen(
        [*QUIRE, "generate", *[STORY] * 8, *LONG, "--engine", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdout.read1(10)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (130, b"")
    assert b"== 8/8 ==" not in out and out.endswith(b"\n")


def test_a_closed_pipe_is_not_an_error(address: str) -> None:
    with subprocess.Popen(
        [*QUIRE, "generate", STORY, *LONG, "--engine", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as program:
        assert program.stdout.read1(10)
        program.stdout.close()
        assert program.wait(timeout=60) == 128 + signal.SIGPIPE
        assert program.stderr.read() == b""


def test_closed_streams_are_an_error_only_where_output_is_lost(address: str) -> None:
    no_output = "quire: standard output is closed\n"
    for redirect, code, error in (
        ("<&-", 0, ""),
        (">&-", 1, no_output),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 1, ""),
        (">/dev/full", 1, "quire: No space left on device\n"),
    ):
        command = (
            f"{sys.executable} -m quire generate x --max-tokens 1 --engine {address} {redirect}"
        )
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (code, error), redirect
    nothing = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m quire generate <&-"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (nothing.returncode, nothing.stderr) == (2, "quire: prompt: standard input is empty\n")


def test_ctrl_c_while_the_engine_starts(tmp_path: Path) -> None:
    """The child process must end too, without any output."""
    with subprocess.Popen(
        [*QUIRE, "generate", STORY], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as program:
        while not (children := psutil.Process(program.pid).children()):
            assert program.poll() is None
            time.sleep(0.01)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=60)
    # CPython itself ends with the signal, 130 for a shell, if Ctrl-C arrives while it executes a
    # string, as dataclasses do
    assert program.returncode in (130, -signal.SIGINT)
    assert (out, err) == (b"", b"")
    assert psutil.wait_procs(children, timeout=60)[1] == []


@pytest.mark.parametrize("arguments", [("generate", STORY), ("serve", "--port", "0")])
def test_ctrl_c_while_loading_leaves_a_clean_line(arguments: tuple[str, ...]) -> None:
    terminal = Terminal(*arguments)
    terminal.wait_for("loading bundled")
    terminal.type("\x03")
    shown = b""
    with suppress(OSError):  # EIO: the program has ended
        while piece := os.read(terminal.fd, 4096):
            shown += piece
    assert terminal.exit_code() in (130, -signal.SIGINT)
    assert b"^C" in shown and shown.endswith(b"\r\x1b[K")


def test_ctrl_c_replaces_no_engine() -> None:
    """As in a terminal, where it reaches the whole process group."""
    with subprocess.Popen(
        [*QUIRE, "generate", *[STORY] * 8, *LONG, *ONE_THREAD],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as program:
        assert program.stdout.read1(10)
        os.killpg(program.pid, signal.SIGINT)
        _, err = program.communicate(timeout=60)
    assert (program.returncode, err) == (130, b"")


@pytest.mark.slow
def test_the_death_of_an_engine_is_exit_code_1_with_its_cause() -> None:
    with subprocess.Popen(
        [*QUIRE, "generate", *[STORY] * 8, *LONG, *ONE_THREAD, "--engine-restarts", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdout.read(10)
        (engine_process,) = psutil.Process(program.pid).children()
        engine_process.kill()
        _, err = program.communicate(timeout=60)
    assert program.returncode == 1
    assert "SIGKILL" in err and "Traceback" not in err
