"""`quire embed` as a process and its parts: inputs, outputs in order, exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from quire import InvalidParameterError
from quire.frontend.cli.embed import InOrder, count_lines, read_texts
from quire.tests.fake_engine import wait_until
from quire.tests.frontend.cli.command import ONE_THREAD, QUIRE, assert_refused, run


def texts(raw: bytes, name: str = "a.txt") -> list:
    return list(read_texts(io.BytesIO(raw), name))


def test_forms_of_a_file() -> None:
    assert texts(b"one\n two \r\n\nlast") == [
        ("one", {"index": 0}),
        (" two ", {"index": 1}),
        ("", {"index": 2}),
        ("last", {"index": 3}),
    ]
    lines = b'{"text": "a", "id": 5}\n"b"\n{"prompt": "c"}\n'
    records = [("a", {"id": 5}), ("b", {"index": 1}), ("c", {"index": 2})]
    assert texts(lines, "a.jsonl") == records
    assert texts(lines, "-") == records
    assert texts("\ufeffé".encode(), "-") == [("é", {"index": 0})]


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b'{"text": "a"}\n{"text": 5}', "a.jsonl line 2 must be a text, or an object"),
        (b'{"text": "a", "prompt": "b"}', "a.jsonl line 1 must be"),
        (b"{", "a.jsonl line 1 is not JSON"),
        (b'"a"\n\xff', r"a.jsonl line 2 is not UTF-8 \(byte 0\)"),
    ],
)
def test_refused_lines_are_named(raw: bytes, problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=problem):
        texts(raw, "a.jsonl")


def test_lines_are_counted() -> None:
    for raw, number in ((b"", 0), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"\n" * 3_000_000, 3e6)):
        file = io.BytesIO(raw)
        assert count_lines(file)[0] == number and file.tell() == 0
    assert count_lines(io.BytesIO(b"a"))[1] != count_lines(io.BytesIO(b"b"))[1]


def test_results_are_written_in_order() -> None:
    written: list = []
    ordered = InOrder(SimpleNamespace(write=lambda record, data: written.append((record, data))))
    ordered.records = [{"index": i} for i in range(4)]
    for index in (2, 0, 3, 1):
        outputs = SimpleNamespace(data=index * 10)
        ordered.take(index, SimpleNamespace(prompt_token_ids=[1], outputs=outputs))
    assert written == [({"index": i}, i * 10) for i in range(4)]
    assert ordered.records == [] and ordered.num_tokens == 4


@pytest.mark.slow
def test_a_file_of_texts(tmp_path: Path) -> None:
    lines = [f"text number {i} " + "x" * (i % 50) for i in range(300)]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    file, output = str(tmp_path / "texts.txt"), tmp_path / "out.npy"
    done = run("embed", file, "--output", str(output), "--progress", *ONE_THREAD)
    assert done.returncode == 0, done.stderr
    assert "Processed prompts: 100%" in done.stderr and "300 texts, " in done.stderr
    rows = np.load(output)
    assert rows.shape[0] == 300 and np.abs(np.linalg.norm(rows, axis=1) - 1).max() < 1e-5
    records = "".join(
        json.dumps({"text": line, "id": f"n{i}"}) + "\n" for i, line in enumerate(lines[:3])
    )
    done = run("embed", "-", *ONE_THREAD, stdin=records)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["id"] for record in found] == ["n0", "n1", "n2"]
    assert (np.array([r["embedding"] for r in found], np.float32) == rows[:3]).all()


@pytest.mark.slow
def test_a_run_that_sigterm_ends_is_continued(tmp_path: Path) -> None:
    lines = [f"text number {i % 7} " + "x" * 10 * (i % 7) for i in range(2000)]
    (tmp_path / "texts.txt").write_text("\n".join(lines))
    words = ["embed", str(tmp_path / "texts.txt"), "-o", str(tmp_path / "out.npy"), *ONE_THREAD]
    process = subprocess.Popen([*QUIRE, *words], stderr=subprocess.PIPE, text=True)
    partial = tmp_path / "out.npy.partial"
    wait_until(lambda: partial.exists() and partial.stat().st_size > 1024, timeout_s=60)
    process.terminate()
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and "the same command continues" in said, said
    num_kept = int(re.search(r"the first (\d+) texts", said)[1])
    assert 0 < num_kept < 2000 and not (tmp_path / "out.npy").exists()
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert f"continues after the first {num_kept} texts" in done.stderr
    assert f"{2000 - num_kept} texts, " in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.npy", "texts.txt"]
    rows = np.load(tmp_path / "out.npy")
    assert len(rows) == 2000 and np.allclose(rows[7:], rows[:-7], atol=1e-2)
    assert not np.allclose(rows[1:], rows[:-1], atol=1e-2)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("none.txt", "cannot read none.txt"),
        ("- -o a.csv", "must end in .npy"),
        ("- -o a.npy --task token_embed", "one row for each text"),
        ("- --dimensions 0", "dimensions"),
    ],
)
def test_bad_arguments_end_before_an_engine_starts(
    capsys: pytest.CaptureFixture, arguments: str, problem: str
) -> None:
    assert_refused(capsys, f"embed {arguments}", problem)
