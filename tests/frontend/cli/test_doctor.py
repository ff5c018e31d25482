"""`quire doctor` as a command: lines, fixes, the exit code, JSON, and settings from the same
sources as `quire serve`.
"""

from __future__ import annotations

import json
import socket
import sys

import pytest
from quire.tests.frontend.cli import command


def call(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    return command.call(capsys, "doctor", *arguments)


def test_lines_and_their_count(capsys: pytest.CaptureFixture) -> None:
    code, out, err = call(capsys, "--port", "0")
    lines = out.splitlines()
    counts = {
        status: sum(line.startswith(status) for line in lines)
        for status in ("pass", "warn", "fail")
    }
    assert (
        err == ""
        and lines[-1] == f"{counts['pass']} pass, {counts['warn']} warn, {counts['fail']} fail"
    )
    assert code == (1 if counts["fail"] else 0)
    assert sum(line.lstrip().startswith("-> ") for line in lines) == counts["warn"] + counts["fail"]
    assert (
        any(line.split() == ["pass", "end", "of", "turn", "<|im_end|>", "(2)"] for line in lines)
        and "\x1b" not in out
    )


def test_one_failure_is_exit_code_1_with_its_fix(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("QUIRE_PORT", str(port))
        code, out, _ = call(capsys)
        assert (
            code == 1
            and f"fail  port               127.0.0.1:{port} is not available" in out
            and f"-> --port {port + 1}" in out
        )
        code, out, _ = call(capsys, "--json")
    stated = json.loads(out)
    assert code == 1 and stated["ok"] is False
    assert [
        finding["name"]
        for finding in stated["findings"]
        if finding["status"] == "fail" and "port" in finding["fix"]
    ] == ["port"]


def test_a_missing_model_is_a_finding(capsys: pytest.CaptureFixture) -> None:
    code, out, err = call(capsys, "./nowhere", "--port", "0")
    assert (code, err) == (
        1,
        "",
    ) and "fail  model              model './nowhere': there is no such directory" in out


def test_a_missing_library_does_not_hide_the_rest(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # importing it now raises ImportError
    monkeypatch.setitem(sys.modules, "quire.frontend.diagnosis.model", None)
    code, out, _ = call(capsys, "--port", "0")
    assert (
        code == 1
        and "pass  python" in out
        and "fail  further checks     a library is missing: " in out
    )
