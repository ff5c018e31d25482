"""`quire models` as a command: a table, JSON lines, warnings on stderr."""

from __future__ import annotations

import json

import pytest
from quire.__main__ import main
from quire.frontend.model_info import model_cache
from quire.frontend.model_info.model_cache import CachedModel

READY = CachedModel(
    model="bundled",
    revision="",
    directory="d",
    size_bytes=2**20,
    dtype="bfloat16",
    architecture="Qwen2ForCausalLM",
    num_parameters=3_970_304,
    problems=[],
)
BROKEN = CachedModel(
    model="some/body[bold]",
    revision="main",
    directory="e",
    size_bytes=5 * 2**30,
    dtype=None,
    architecture=None,
    num_parameters=None,
    problems=["no config.json", "no tokenizer.json"],
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cache, "list_models", lambda: ([READY, BROKEN], ["a folder is odd"]))


def test_a_table(capsys: pytest.CaptureFixture) -> None:
    assert main(["models"]) == 0
    captured = capsys.readouterr()
    header, first, second = captured.out.splitlines()
    assert header.split() == [
        "model",
        "revision",
        "size",
        "dtype",
        "parameters",
        "architecture",
        "state",
    ]
    assert first.split() == [
        "bundled",
        "1.0",
        "MiB",
        "bfloat16",
        "3.97M",
        "Qwen2ForCausalLM",
        "ready",
    ]
    assert second.startswith("some/body[bold]  main ") and second.endswith(
        "no config.json; no tokenizer.json"
    )
    assert captured.err == "quire: a folder is odd\n"


def test_json(capsys: pytest.CaptureFixture) -> None:
    assert main(["models", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["model"] for line in lines] == ["bundled", "some/body[bold]"] and lines[1][
        "problems"
    ] == BROKEN.problems
