"""`quire models` as a command: a table, JSON lines, warnings; one model; removal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest
from quire.__main__ import main
from quire.frontend.cli.models import state_of
from quire.frontend.model_info import model_cache
from quire.frontend.model_info.model_cache import CachedModel
from quire.tests.frontend.cli.command import call

READY = CachedModel(
    model="bundled",
    revision="",
    directory="d",
    size_bytes=2**20,
    weights="BF16",
    architecture="Qwen2ForCausalLM",
    num_parameters=3_970_304,
    problems=[],
    needs_bytes=400 * 2**20,
    fits=True,
)
BROKEN = CachedModel(
    model="some/body[bold]",
    revision="main",
    directory="e",
    size_bytes=5 * 2**30,
    weights=None,
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
        "weights",
        "parameters",
        "architecture",
        "needs",
        "state",
    ]
    assert first.split() == [
        "bundled",
        "1.0",
        "MiB",
        "BF16",
        "3.97M",
        "Qwen2ForCausalLM",
        "400.0",
        "MiB",
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


def test_states() -> None:
    assert state_of(BROKEN) == "no config.json; no tokenizer.json"
    short = msgspec.structs.replace(READY, flags=["--max-model-len", "1024"])
    assert state_of(short) == "ready with --max-model-len 1024"
    large = msgspec.structs.replace(READY, fits=False)
    assert state_of(large) == "too large for the memory that is free"


def test_one_model(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    import quire.frontend.bundled_model as bundled

    directory = str(Path(str(bundled.__file__)).parent)
    ready = msgspec.structs.replace(READY, directory=directory)
    monkeypatch.setattr(model_cache, "list_models", lambda: ([ready, BROKEN], []))
    code, out, _ = call(capsys, "models", "show", "Bundled")
    first, second, third, *plan = out.splitlines()
    assert (code, first) == (0, f"bundled: 1.0 MiB in {directory}")
    assert (second, third) == ("weights: BF16", "state: ready")
    assert any(line.startswith("longest context") for line in plan)
    code, out, _ = call(capsys, "models", "show", "bundled", "--json")
    shown = json.loads(out)
    assert shown["needs_bytes"] == 400 * 2**20 and shown["plan"]["max_model_len"] == 4096
    code, out, _ = call(capsys, "models", "show", BROKEN.model)
    assert code == 0 and out.endswith("state: no config.json; no tokenizer.json\n")
    code, _, err = call(capsys, "models", "show", "some/body")
    assert code == 2 and err == (
        "quire: model 'some/body' is not on this machine; there are: some/body[bold]\n"
    )


def test_removal_asks_first(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--m"
    (folder / "blobs").mkdir(parents=True)
    (folder / "blobs" / "a").write_bytes(bytes(2048))
    code, _, err = call(capsys, "models", "remove", "org/m")
    assert code == 2 and "--yes" in err and folder.exists()

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: print(question) or "")
    code, out, _ = call(capsys, "models", "remove", "org/m")
    assert code == 1 and folder.exists()
    assert out == f"{folder}\nRemove org/m, 2.0 KiB? [y/N] \nnothing was removed\n"
    assert call(capsys, "models", "remove", "org/m", "--yes")[:2] == (0, "removed org/m: 2.0 KiB\n")
    assert not folder.exists()
    code, _, err = call(capsys, "models", "remove", "org/m", "--yes")
    assert code == 2 and "is not in" in err


def test_actions_and_names_belong_together(capsys: pytest.CaptureFixture) -> None:
    for words in (
        ["show"],
        ["show", "bundled", "bundled"],
        ["show", "bundled", "--download"],
        ["list", "bundled"],
        ["remove"],
        ["remove", "bundled", "--catalogue", "x"],
        ["check"],
    ):
        code, _, err = call(capsys, "models", *words)
        assert code == 2 and "usage: quire models" in err


def test_a_catalogue(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    config = tmp_path / "a.json"
    config.write_text('{"architectures": ["BloomForCausalLM"], "model_type": "bloom"}')
    names = tmp_path / "names.txt"
    names.write_text(f"# mine\n{config}\n")
    code, out, _ = call(capsys, "models", "check", "bundled", "--catalogue", str(names))
    header, first, second, summary = out.splitlines()
    assert code == 0 and header.split() == ["model", "runs", "architecture", "reason"]
    assert first.split() == ["bundled", "natively", "Qwen2ForCausalLM"]
    assert second.split()[:3] == [str(config), "not", "BloomForCausalLM"]
    assert "attention interface" in second
    assert summary == "2 models: 1 natively, 0 in transformers' code, 1 not, 0 unknown"

    code, out, _ = call(capsys, "models", "--catalogue", str(names), "--json")
    (line,) = out.splitlines()
    verdict = json.loads(line)
    assert code == 0 and (verdict["model"], verdict["runs"]) == (str(config), "not")

    code, _, err = call(capsys, "models", "--catalogue", str(tmp_path / "none"))
    assert code == 2 and "--catalogue: " in err and "No such file" in err
