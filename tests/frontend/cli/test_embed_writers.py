"""Files of embeddings, read back by their own libraries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from quire import InvalidParameterError
from quire.frontend.cli import embed_writers
from quire.frontend.cli.embed_writers import check_output, make_writer

ROWS = np.random.default_rng(0).standard_normal((5000, 7)).astype(np.float32)


def write(path: Path, rows=ROWS, *, is_by_token: bool = False) -> None:
    writer = make_writer(str(path), is_by_token=is_by_token)
    for i, row in enumerate(rows):
        writer.write({"index": i, "name": f"text {i}"}, row)
    assert not path.exists()  # before it is complete
    writer.close()
    writer.discard()
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
    writer.discard()
    assert list(tmp_path.iterdir()) == []
