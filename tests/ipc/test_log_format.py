"""The log as text and as JSON, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, sys
from quire.ipc.log_format import configure_logging, current_format
from quire.ipc.process import engine_command
configure_logging(logging.INFO, sys.argv[1])
log = logging.getLogger("quire.test")
log.info("a line\\nof %s", "text", extra={"fields": {"status": 200, "path": "/v1"}})
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
print(current_format(), engine_command(listen="ipc:///x")[-3])
"""


def log_of(log_format: str) -> tuple[list[str], str]:
    """(lines of stderr, stdout)."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stderr.splitlines(), done.stdout.strip()


def test_json() -> None:
    lines, stdout = log_of("json")
    first, second = map(json.loads, lines)
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "INFO",
        "logger": "quire.test",
        "message": "a line\nof text",
        "status": 200,
        "path": "/v1",
    }
    assert second["level"] == "ERROR" and "ZeroDivisionError" in second["exception"]
    assert stdout == "json json"  # a child logs alike


def test_text() -> None:
    lines, stdout = log_of("text")
    assert lines[0].endswith("INFO quire.test: a line") and lines[1] == "of text"
    assert stdout == "text text"
