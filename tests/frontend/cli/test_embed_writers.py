"""Files of embeddings, read back by their own libraries."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from quire import InvalidParameterError
from quire.frontend.cli import embed_writers
from quire.frontend.cli.embed_writers import Writer, check_output, make_writer
from quire.tests.ipc.test_own_files import FAULTS

ROWS = np.random.default_rng(0).standard_normal((5000, 7)).astype(np.float32)

needs_arrow = pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")


def write(path: Path, rows=ROWS, *, is_by_token: bool = False) -> None:
    writer = make_writer(str(path), is_by_token=is_by_token)
    for i, row in enumerate(rows):
        writer.write({"index": i, "name": f"text {i}"}, row)
    assert not path.exists()  # before it is complete
    writer.close()
    assert writer.leave() == 0
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_npy(tmp_path: Path) -> None:
    write(tmp_path / "a.npy")
    assert np.load(tmp_path / "a.npy").tobytes() == ROWS.tobytes()
    assert np.load(tmp_path / "a.npy", mmap_mode="r").shape == ROWS.shape
    (tmp_path / "a.npy").unlink()
    write(tmp_path / "none.npy", [])
    assert np.load(tmp_path / "none.npy").shape == (0, 0)


def test_json_lines(tmp_path: Path, capfdbinary) -> None:
    write(tmp_path / "a.jsonl", ROWS[:20])
    records = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [record["index"] for record in records] == list(range(20))
    assert records[3]["name"] == "text 3"
    assert (np.array([r["embedding"] for r in records], np.float32) == ROWS[:20]).all()
    writer = make_writer("-", is_by_token=True)
    writer.write({"id": "x"}, ROWS[:2])
    writer.close()
    record = json.loads(capfdbinary.readouterr().out)
    assert record["id"] == "x" and np.array(record["embedding"]).shape == (2, 7)


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    write(tmp_path / "a.parquet")
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.column("name")[4999].as_py() == "text 4999"
    assert np.array(table.column("embedding").to_pylist(), np.float32).tobytes() == ROWS.tobytes()
    (tmp_path / "a.parquet").unlink()
    write(tmp_path / "b.parquet", [ROWS[:3], ROWS[:1]], is_by_token=True)
    found = parquet.read_table(tmp_path / "b.parquet").column("embedding").to_pylist()
    assert [len(rows) for rows in found] == [3, 1]


def test_refusals_come_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(InvalidParameterError, match=r"must end in \.npy, \.parquet or \.jsonl"):
        check_output("a.csv", is_by_token=False)
    with pytest.raises(InvalidParameterError, match="one row for each text"):
        check_output("a.npy", is_by_token=True)
    monkeypatch.setattr(embed_writers, "find_spec", lambda name: None)
    with pytest.raises(InvalidParameterError, match="needs the package pyarrow"):
        check_output("a.parquet", is_by_token=False)
    with pytest.raises(InvalidParameterError, match="cannot write"):
        make_writer(str(tmp_path / "no" / "a.npy"), is_by_token=False)
    writer = make_writer(str(tmp_path / "a.npy"), is_by_token=False)
    writer.write({}, ROWS[0])
    assert writer.leave() == 0  # nobody could compute the rest of standard input
    assert list(tmp_path.iterdir()) == []


RUN = {"input": "a digest", "model": "a model"}
FORMATS = ["npy", "jsonl", pytest.param("parquet", marks=needs_arrow)]


def add(writer: Writer, begin: int, end: int) -> None:
    for i in range(begin, end):
        writer.write({"index": i, "name": f"text {i}"}, ROWS[i])


def read(path: Path) -> np.ndarray:
    """The rows, after a check of the records beside them."""
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in path.read_text().splitlines()]
    else:
        records = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
    assert [record["name"] for record in records] == [f"text {i}" for i in range(len(records))]
    return np.array([record["embedding"] for record in records], np.float32)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("end", ["left", "killed"])
def test_a_second_run_continues(tmp_path: Path, suffix: str, end: str) -> None:
    path = tmp_path / f"a.{suffix}"
    for begin, stop in ((0, 1500), (1500, 1501), (1501, 4700)):
        writer = make_writer(str(path), is_by_token=False, run=RUN)
        assert writer.num_done == begin
        add(writer, begin, stop)
        if end == "left":
            assert writer.leave() == stop
        else:  # after a state was saved, in the middle of a row
            writer._save()
            writer._target.file.write(b"half a row")
            writer._target.file.close()
        assert not path.exists()
    writer = make_writer(str(path), is_by_token=False, run=RUN)
    add(writer, writer.num_done, len(ROWS))
    writer.close()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert read(path).tobytes() == ROWS.tobytes()


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_run_that_was_stopped_before_it_closed_its_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    writer = make_writer(str(path), is_by_token=False, run=RUN)
    add(writer, 0, len(ROWS))
    assert writer.leave() == len(ROWS)
    make_writer(str(path), is_by_token=False, run=RUN).close()
    assert read(path).tobytes() == ROWS.tobytes()


def test_rows_of_another_run_are_not_mixed(tmp_path: Path) -> None:
    name = str(tmp_path / "a.npy")
    writer = make_writer(name, is_by_token=False, run=RUN)
    add(writer, 0, 10)
    with pytest.raises(InvalidParameterError, match="another process writes"):
        make_writer(name, is_by_token=False, run=RUN)
    assert writer.leave() == 10
    for run, words in (
        (RUN | {"model": "b"}, "10 rows of a run with another model; give --no-resume"),
        (None, "another input"),
    ):
        with pytest.raises(InvalidParameterError, match=words):
            make_writer(name, is_by_token=False, run=run)
    state = tmp_path / "a.npy.partial.json"
    state.write_bytes(state.read_bytes()[:20])
    with pytest.raises(InvalidParameterError, match="cannot be understood"):
        make_writer(name, is_by_token=False, run=RUN)
    writer = make_writer(name, is_by_token=False, run=RUN, resumes=False)
    assert writer.num_done == 0
    add(writer, 0, 3)
    writer.close()
    assert np.load(name).tobytes() == ROWS[:3].tobytes()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_state_that_others_may_have_changed_is_refused(tmp_path: Path, fault: str) -> None:
    """As the files of the caches, but by an error: rows would be lost."""
    if fault == "another owner" and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    name, state = str(tmp_path / "a.npy"), tmp_path / "a.npy.partial.json"
    writer = make_writer(name, is_by_token=False, run=RUN)
    add(writer, 0, 10)
    assert writer.leave() == 10
    FAULTS[fault](state)
    with pytest.raises(InvalidParameterError, match="partial.json .*give --no-resume"):
        make_writer(name, is_by_token=False, run=RUN)
    writer = make_writer(name, is_by_token=False, run=RUN, resumes=False)
    add(writer, 0, 10)
    assert writer.leave() == 10
    assert make_writer(name, is_by_token=False, run=RUN).num_done == 10


def test_what_lies_at_the_paths_and_cannot_be_used_is_named(tmp_path: Path) -> None:
    name, state = str(tmp_path / "a.npy"), tmp_path / "a.npy.partial.json"
    state.write_bytes(b" " * (embed_writers.MAX_STATE_BYTES + 1))
    with pytest.raises(InvalidParameterError, match="has 1048577 bytes.*; give --no-resume"):
        make_writer(name, is_by_token=False, run=RUN)
    state.unlink()
    partial = tmp_path / "a.npy.partial"
    partial.unlink()
    os.mkfifo(partial)
    with pytest.raises(InvalidParameterError, match="cannot write .*a.npy: .*not seekable"):
        make_writer(name, is_by_token=False, run=RUN)


def test_a_digit_of_the_state_that_changed_is_found(tmp_path: Path) -> None:
    name, state = str(tmp_path / "a.npy"), tmp_path / "a.npy.partial.json"
    writer = make_writer(name, is_by_token=False, run=RUN)
    add(writer, 0, 10)
    writer.leave()
    state.write_bytes(state.read_bytes().replace(b'"num_rows":10', b'"num_rows":11'))
    with pytest.raises(InvalidParameterError, match="its checksum is wrong"):
        make_writer(name, is_by_token=False, run=RUN)


@pytest.mark.parametrize("num_saved", [0, 100])
def test_a_full_disk_leaves_what_was_saved(tmp_path: Path, num_saved: int) -> None:
    path = tmp_path / "a.jsonl"
    writer = make_writer(str(path), is_by_token=False, run=RUN)
    add(writer, 0, num_saved)
    if num_saved:
        writer._save()
    file = writer._target.file
    add(writer, num_saved, 200)
    with open("/dev/full", "wb") as full:
        os.dup2(full.fileno(), file.fileno())
        assert writer.leave() == num_saved
    left = {"a.jsonl.partial", "a.jsonl.partial.json"} if num_saved else set()
    assert {p.name for p in tmp_path.iterdir()} == left
    if num_saved:
        writer = make_writer(str(path), is_by_token=False, run=RUN)
        add(writer, num_saved, len(ROWS))
        writer.close()
        assert read(path).tobytes() == ROWS.tobytes()
