"""The `quire` command for tests: in its own process, in this one, and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from quire.__main__ import main

QUIRE = [sys.executable, "-m", "quire"]


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        [*QUIRE, *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False
    )


def call(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    """Run the command in this process. Return (exit code, stdout, stderr)."""
    try:
        code = main(list(arguments))
    except SystemExit as leaving:  # argparse
        code = leaving.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def assert_refused(capsys: pytest.CaptureFixture, arguments: str, sentence: str) -> None:
    """The command, in this process, prints one line with `sentence` and exits with 2."""
    code, out, err = call(capsys, *arguments.split())
    assert (code, out) == (2, "")
    assert sentence in err and err.count("\n") == 1


def json_lines(done: subprocess.CompletedProcess) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@contextmanager
def interrupts_ignored() -> Iterator[None]:
    """SIGINT is ignored in this process and those that it starts, as in those that a shell without
    job control starts in the background.
    """
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def running_daemon(path: Path) -> Iterator[str]:
    """A daemon on the bundled model, ended by SIGTERM; it must exit with 0."""
    with subprocess.Popen(
        [*QUIRE, "engine", "--listen", f"ipc://{path}", *ONE_THREAD],
        stderr=subprocess.PIPE,
        text=True,
    ) as daemon:
        while not path.exists():
            assert daemon.poll() is None, daemon.stderr.read()
            time.sleep(0.05)
        yield f"ipc://{path}"
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=60) == 0
        assert not path.exists()
        assert "Traceback" not in daemon.stderr.read()


ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])")


class Terminal:
    """A program on its own terminal of 100 columns by 40 rows: its output, and key presses."""

    def __init__(self, *arguments: str, **environment: str):
        pid, self.fd = pty.fork()
        if pid == 0:
            termios.tcsetwinsize(0, (40, 100))
            os.environ.update(environment)
            os.execv(sys.executable, [*QUIRE, *arguments])
        self.pid, self.shown = pid, ""

    def wait_for(self, text: str, timeout_s: float = 30.0) -> str:
        """Wait for `text` after the text of the last wait. Return the output before it, without
        colours and cursor movements.
        """
        deadline = time.monotonic() + timeout_s
        while text not in self.shown:
            assert select.select([self.fd], [], [], deadline - time.monotonic())[0], (
                f"{text!r} not in {self.shown!r}"
            )
            self.shown += os.read(self.fd, 4096).decode(errors="replace")
            # a space at the end of a line is drawn by moving the cursor
            self.shown = ESCAPES.sub("", self.shown.replace("\x08\x1b[2C", " "))
        before, _, self.shown = self.shown.partition(text)
        return before

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def exit_code(self) -> int:
        try:
            while os.read(self.fd, 4096):
                pass
        except OSError:
            # EIO: the program has closed its terminal. Closing this end first would kill the
            # program.
            os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


STORY = "Once upon a time"
# on a busy machine, two threads of such a small model mostly wait for each other
ONE_THREAD = ("--num-threads", "1")
LONG = ("--max-tokens", "1500", "--ignore-eos")
