"""`quire bench embed` with the bundled model: figures, files, errors."""

import json
from pathlib import Path

import pytest
from quire.tests.frontend.cli import command

ENGINE = ["--engine", "inproc", "--max-model-len", "128", "--num-threads", "1"]


def call(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, str, str]:
    return command.call(capsys, "bench", "embed", *arguments)


def test_figures(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    words = ["--batch-size=3", "--input-len=12", "--num-iters=4", "--num-iters-warmup=1"]
    code, out, err = call(capsys, *words, "--json", str(path), *ENGINE)
    assert (code, err) == (0, "")
    assert out.startswith("4 batches of 3 texts, ") and " texts/s (median), " in out
    found = json.loads(path.read_text())
    assert len(found["seconds"]) == 4 and found["num_tokens"] >= 4 * 3 * 12
    assert found["settings"]["batch_size"] == 3 and found["machine"]["num_cores"] >= 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--batch-size 0", "quire: --batch-size: must be at least 1, got 0"),
        ("--num-iters 0", "quire: --num-iters: must be at least 1, got 0"),
        (
            "--engine inproc --skip-tokenizer-init",
            "quire: skip_tokenizer_init: the tokenizer is needed to generate texts",
        ),
    ],
)
def test_errors_are_one_sentence(words: str, problem: str, capsys: pytest.CaptureFixture) -> None:
    assert call(capsys, *words.split()) == (2, "", f"{problem}\n")
