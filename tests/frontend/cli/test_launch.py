"""`quire launch`: what each agent is told, programs that are not there, and servers that refuse."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml
from quire.frontend.cli.launch import AGENTS, filled
from quire.tests.frontend.cli import command

CARDS = [{"id": "tiny", "max_model_len": 512}, {"id": "other", "max_model_len": 64}]
PROGRAM = """#!/bin/sh
echo "$@"
env
"""


class Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        is_known = self.headers.get("authorization") in (None, "Bearer secret")
        answer = {"data": CARDS} if is_known else {"error": {"message": "Wrong key."}}
        body = json.dumps(answer).encode()
        self.send_response(200 if is_known else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def call(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    return command.call(capsys, "launch", *arguments)


def test_the_agents_are_listed(capsys: pytest.CaptureFixture) -> None:
    code, out, _ = call(capsys)
    assert code == 0 and all(f"{name} " in out for name in AGENTS)


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_gets_the_address_and_the_model(
    name: str, url: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    code, out, _ = call(capsys, name, "--url", f"{url}/v1", "--print", "--", "do it")
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    told = "\n".join([out, *files])
    assert code == 0 and url in told and "tiny" in told and out.endswith(" 'do it'\n")
    assert "$url" not in told and "$model" not in told and f"{url}/v1/v1" not in told


def test_settings_are_of_the_agents_syntax(
    url: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    for name in ("opencode", "continue", "llm"):
        call(capsys, name, "--url", url, "--model", "other", "--api-key", "secret", "--print")
    folder = tmp_path / "cache" / "quire" / "agents"
    opencode = json.loads((folder / "opencode" / "opencode.json").read_text())
    limit = {"context": 64, "output": 64}
    assert opencode["provider"]["quire"]["models"] == {"other": {"limit": limit}}
    [model] = yaml.safe_load((folder / "continue" / "config.yaml").read_text())["models"]
    assert (model["apiBase"], model["apiKey"], model["contextLength"]) == (
        f"{url}/v1",
        "secret",
        64,
    )
    [model] = yaml.safe_load((folder / "llm" / "extra-openai-models.yaml").read_text())
    assert (model["model_id"], model["api_base"]) == ("other", f"{url}/v1")
    assert json.loads((folder / "llm" / "keys.json").read_text()) == {"quire": "secret"}
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*.*")}
    assert modes == {0o600}


def test_a_key_is_not_printed(url: str, capsys: pytest.CaptureFixture) -> None:
    _, out, _ = call(capsys, "claude", "--url", url, "--api-key", "secret", "--print")
    assert "secret" not in out and 'ANTHROPIC_AUTH_TOKEN="$OPENAI_API_KEY"' in out


def test_an_agent_that_is_there_is_started(url: str, tmp_path: Path) -> None:
    program = tmp_path / "claude"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "quire", "launch", "claude", "--url", url, "--", "-p", "a b"],
        env=os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    first, *variables = done.stdout.splitlines()
    assert first == "-p a b"
    assert {f"ANTHROPIC_BASE_URL={url}", "ANTHROPIC_MODEL=tiny"} <= set(variables)


def test_an_agent_that_is_not_there_is_named(
    url: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = call(capsys, "codex", "--url", url, "--", "exec", "hi")
    assert code == 1 and out.startswith("OPENAI_API_KEY=none") and out.endswith(" exec hi\n")
    assert "codex is not installed; npm install -g @openai/codex" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("emacs",), 2, "must be one of claude, codex"),
        (("codex", "--model", "big"), 2, "must be one of tiny, other"),
        (("claude", "-p", "hi"), 2, "unknown flag -p; see quire launch --help-all, and give"),
        (("codex", "exec", "hi"), 2, "exec; see quire launch --help-all, and give the agent's own"),
        (("codex", "--api-key", "other"), 1, "Wrong key."),
        (("codex", "--api-key", "a'b"), 1, "Wrong key."),
        (("codex", "--url", "http://127.0.0.1:9"), 1, "no server answers at"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], code: int, words: str, url: str, capsys: pytest.CaptureFixture
) -> None:
    found, out, err = call(capsys, arguments[0], "--url", url, *arguments[1:])
    assert (found, out) == (code, "") and words in err and err.count("\n") == 1


def test_a_model_whose_name_would_end_a_text_is_refused(
    url: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.CARDS", [{"id": 'a"b', "max_model_len": 5}])
    code, _, err = call(capsys, "codex", "--url", url)
    assert code == 2 and "model: must not contain quotes" in err


def test_dollar_signs_of_an_agents_own_syntax_are_kept() -> None:
    settings = dict.fromkeys(("url", "model", "context", "key", "folder"), "x")
    for agent in AGENTS.values():
        variables, argv = filled(agent, settings)
        assert not any("$" in text for text in [*variables.values(), *argv])
