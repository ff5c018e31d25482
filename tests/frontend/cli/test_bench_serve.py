"""`quire bench serve` as a command against a scripted server: results, exit codes, messages."""

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from quire.tests.frontend.cli import command
from quire.tests.scripted_server import (
    HANG,
    STREAM_HEAD,
    Script,
    ScriptedServer,
    answer,
    chat_stream,
    completion_stream,
    scripted_server,
)

SMALL = ["--num-prompts", "6", "--input-len", "5", "--output-len", "3"]


@contextmanager
def serving(script: Callable[[dict[str, Any]], Script]) -> Iterator[tuple[str, ScriptedServer]]:
    """A scripted server in a thread, since the command runs its own event loop."""
    ready, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with scripted_server(script) as url_and_server:
            found.extend(url_and_server)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield found[0], found[1]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


def server(request: dict[str, Any]) -> Script:
    if request["method"] == "GET":
        return [answer('{"data": [{"id": "tiny"}]}')]
    if request["path"] == "/v1/chat/completions":
        return chat_stream(["a", "b"])
    return completion_stream(["a", "b", "c"], {"prompt_tokens": 5, "completion_tokens": 3})


def call(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    return command.call(capsys, "bench", "serve", *arguments)


def test_a_run_and_its_file(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    with serving(server) as (url, scripted):
        words = [
            "--base-url",
            url,
            *SMALL,
            "--goodput",
            "ttft:60000",
            "--ignore-eos",
            "--extra-body",
            '{"min_tokens": 3}',
            "--json",
            str(path),
        ]
        code, out, err = call(capsys, *words)
    assert (code, err) == (0, "")
    assert (
        "completions of tiny at" in out
        and "output tokens                     18" in out
        and "goodput                            6" in out
    )
    found = json.loads(path.read_text())
    assert (
        found["num_successes"],
        found["num_output_tokens"],
        found["settings"]["model"],
        len(found["requests"]),
    ) == (6, 18, "tiny", 6)
    body = scripted.requests[-1]["body"]
    assert (body["ignore_eos"], body["min_tokens"], body["max_tokens"]) == (True, 3, 3)


def test_a_chat_of_several_turns(capsys: pytest.CaptureFixture) -> None:
    with serving(server) as (url, scripted):
        words = [
            "--endpoint",
            "chat",
            "--dataset-name",
            "multi-turn",
            "--num-turns",
            "2",
            "--num-prompts",
            "2",
            "--num-warmups",
            "0",
        ]
        code, out, _ = call(capsys, "--base-url", url, *words)
    assert (
        code == 0 and "successful requests                4" in out and "chunks were counted" in out
    )
    assert sorted(
        len(request["body"]["messages"]) for request in scripted.requests if request["body"]
    ) == [1, 1, 3, 3]


def test_the_same_seed_sends_the_same_requests(capsys: pytest.CaptureFixture) -> None:
    asked = []
    for seed in ("1", "1", "2"):
        with serving(server) as (url, scripted):
            call(
                capsys,
                "--base-url",
                url,
                *SMALL,
                "--seed",
                seed,
                "--max-concurrency",
                "1",
                "--request-rate",
                "1000",
            )
        asked.append(
            [request["body"]["prompt"] for request in scripted.requests if request["body"]]
        )
    assert asked[0] == asked[1] != asked[2] and len(set(asked[0])) == 7


def test_only_failures_is_exit_code_1(capsys: pytest.CaptureFixture) -> None:
    with serving(
        lambda request: [answer('{"error": {"message": "no"}}', "500 Internal Server Error")]
    ) as (url, _):
        code, out, err = call(
            capsys, "--base-url", url, "--model", "m", "--num-warmups", "0", *SMALL
        )
        assert code == 1 and "6 HTTP 500; the first: no" in out
        code, out, err = call(capsys, "--base-url", url, "--model", "m", *SMALL)
        assert (code, out) == (1, "") and err == f"quire: {url}: the warm-up failed: HTTP 500: no\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "--base-url localhost",
            "quire: --base-url: must be like http://127.0.0.1:8000, got 'localhost/v1'",
        ),
        ("--goodput fast", "quire: --goodput: must be METRIC:MILLISECONDS"),
        ("--extra-body [1]", "quire: --extra-body: must be a JSON object, got '[1]'"),
        ("--extra-body {", "quire: --extra-body: must be a JSON object, got '{'"),
        ("--request-rate 0", "quire: --request-rate: must be greater than 0, got 0.0"),
        ("--num-prompts 0", "quire: --num-prompts: must be at least 1, got 0"),
        (
            "--num-prompts many",
            "quire bench serve: argument --num-prompts: invalid int value: 'many'",
        ),
        ("--dataset-name alpaca", "argument --dataset-name: invalid choice: 'alpaca'"),
        ("--tokenizer ./none", "quire: model './none': there is no such directory"),
        ("--token-ids", "quire: --token-ids: needs --tokenizer"),
        (
            "--token-ids --tokenizer bundled --endpoint chat",
            "quire: --token-ids: requires --endpoint completions, because chat messages are text",
        ),
        ("--max-concurency 3", "unknown flag --max-concurency; did you mean --max-concurrency?"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture
) -> None:
    command.assert_refused(capsys, f"bench serve {arguments}", sentence)


def test_a_terminal_shows_the_progress() -> None:
    def script(request: dict[str, Any]) -> Script:
        asked.append(request)
        return server(request) if len(asked) != 5 else [answer("no", "500 Internal Server Error")]

    asked: list[Any] = []
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    with serving(script) as (url, _):
        command = [sys.executable, "-m", "quire", "bench", "serve", "--base-url", url, *SMALL]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=False
        )
    os.close(theirs)
    shown = os.read(mine, 65536).decode()
    os.close(mine)
    assert done.returncode == 0 and "failed requests                    1" in done.stdout
    assert "0/6" in shown and "6/6" in shown and "1 failed" in shown


def test_ctrl_c_prints_what_was_measured(tmp_path: Path) -> None:
    asked: list[Any] = []
    process: list[subprocess.Popen] = []

    def script(request: dict[str, Any]) -> Script:
        if request["method"] == "GET":
            return server(request)
        asked.append(request)
        if len(asked) < 4:  # the warm-up and two
            return server(request)
        os.kill(process[0].pid, signal.SIGINT)
        return [STREAM_HEAD, HANG]

    with serving(script) as (url, _):
        command = [
            sys.executable,
            "-m",
            "quire",
            "bench",
            "serve",
            "--base-url",
            url,
            *SMALL,
            "--max-concurrency",
            "1",
        ]
        process.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        out, err = process[0].communicate(timeout=60)
    assert (process[0].returncode, err) == (130, "")
    assert (
        "interrupted: 4 requests had not ended" in out
        and "successful requests                2" in out
    )
