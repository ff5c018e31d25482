"""The log as text and as JSON, in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, sys
from quire.ipc.log_format import announce, configure_logging, current_format
from quire.ipc.process import engine_command
configure_logging(logging.INFO, sys.argv[1])
log = logging.getLogger("quire.test")
log.info("a line\\nof %s", "text", extra={"fields": {"status": 200, "path": "/v1"}})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
announce(log, "quire test", "the end", logging.ERROR)
print(current_format(), engine_command(listen="ipc:///x")[-3])
"""


def log_of(log_format: str, program: str = PROGRAM) -> tuple[list[str], str]:
    """Return (lines of stderr, stdout)."""
    done = subprocess.run(
        [sys.executable, "-c", program, log_format],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr.splitlines(), done.stdout.strip()


def test_json() -> None:
    lines, stdout = log_of("json")
    first, second, last = map(json.loads, lines)
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "INFO",
        "logger": "quire.test",
        "message": "a line\nof text",
        "status": 200,
        "path": "/v1",
    }
    assert second["level"] == "ERROR" and "ZeroDivisionError" in second["exception"]
    assert (last["level"], last["logger"], last["message"]) == ("ERROR", "quire.test", "the end")
    assert stdout == "json json"  # a child process logs in the same format


def test_text() -> None:
    lines, stdout = log_of("text")
    assert lines[0].endswith("INFO quire.test: a line") and lines[1] == "of text"
    assert lines[-1] == "quire test: the end"
    assert stdout == "text text"


MODELS = """
import asyncio, contextvars, logging, sys
from quire.ipc.log_format import configure_logging, name_model
from quire.ipc.process import engine_command
configure_logging(logging.INFO, sys.argv[1])
log = logging.getLogger("quire.test")
async def work():
    async def inner():
        log.info("inner")
        print(*engine_command(listen="ipc:///x")[-2:])
    name_model("small")
    log.info("outer")
    await asyncio.create_task(inner())
async def main():
    await asyncio.create_task(work())
    log.info("of none")
asyncio.run(main())
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_lines_of_a_task_name_the_model_it_works_for(log_format: str) -> None:
    lines, stdout = log_of(log_format, MODELS)
    if log_format == "json":
        entries = [json.loads(line) for line in lines]
        assert [entry.get("model") for entry in entries] == ["small", "small", None]
    else:
        said = [line.partition("quire.test: ")[2] for line in lines]
        assert said == ["[small] outer", "[small] inner", "of none"]
    assert stdout == "--log-model small"  # so that the engine's process names it too


LOSSY = """
import logging, os, sys, threading
from quire.ipc.log_format import configure_logging
configure_logging(logging.INFO, "text")
if len(sys.argv) > 1:  # "é" and the rest have been read; then the reader leaves
    print("é", "x" * 100_000, file=sys.stderr)
    sys.stdin.read()
for _ in range(3):
    print("x" * 100_000, file=sys.stderr, flush=True)
    logging.getLogger("quire.test").info("lost")
    sys.stderr.flush()
print("goes on", sys.stderr.fileno(), sys.stderr.encoding)
"""


def test_a_full_disk_behind_stderr_is_ignored() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", LOSSY]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()[:3]) == (0, ["goes", "on", "2"])


def test_a_closed_reader_of_stderr_is_ignored() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", LOSSY, "wait"], stdin=pipe, stdout=pipe, stderr=pipe
    ) as process:
        written = process.stderr.read(100_004)
        process.stderr.close()
        process.stdin.close()
        assert process.stdout.read().startswith(b"goes on")
    assert process.returncode == 0
    assert written.decode() == "é " + "x" * 100_000 + "\n"
