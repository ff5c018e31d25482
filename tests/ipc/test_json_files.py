"""JSON files of a model directory: any content is read or refused with one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from quire.ipc import json_files
from quire.ipc.errors import ModelLoadError
from quire.ipc.json_files import MAX_NESTING, read_json, read_json_if_exists


def test_an_object_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_json_if_exists(path) == {}
    path.write_text(
        '{"a": [1, {"b": null}], "c": 9223372036854775807, "d": 1000000000000000000000}'
    )
    assert read_json(path) == {"a": [1, {"b": None}], "c": 2**63 - 1, "d": 1e21}
    # messages between processes carry no larger integers
    assert isinstance(read_json(path)["d"], float)
    assert read_json_if_exists(path) == read_json(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "cannot be read"),
        (b"{", "cannot be read"),
        (b"\xff\xfe{}", "cannot be read"),
        (b"[]", "must hold a JSON object, not a list"),
        (b"7", "must hold a JSON object, not a int"),
        (b'{"a": ' * 100_000, "is nested too deeply"),
        (b'{"a": ' * MAX_NESTING + b"{}" + b"}" * MAX_NESTING, "is nested too deeply"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "is nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", None),
    ],
)
def test_other_content_is_refused(content: bytes, problem: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    if problem is None:
        assert read_json(path) == {"a": float("inf")}
        return
    with pytest.raises(ModelLoadError, match=problem) as caught:
        read_json(path)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_a_path_that_is_not_a_file_is_not_opened(tmp_path: Path) -> None:
    """Opening a pipe would block until a writer opens it."""
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "device.json").symlink_to("/dev/zero")
    (tmp_path / "loop.json").symlink_to("loop.json")
    for name in ("pipe", "folder", "device"):
        with pytest.raises(ModelLoadError, match=f"{name}.json is not a regular file"):
            read_json(tmp_path / f"{name}.json")
    for name in ("loop", "none"):
        with pytest.raises(ModelLoadError, match=f"has no {name}.json|cannot be read"):
            read_json(tmp_path / f"{name}.json")


def test_an_endless_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    monkeypatch.setattr(json_files, "MAX_BYTES", 7)
    with pytest.raises(ModelLoadError, match="has 8 bytes, the most is 7"):
        read_json(path)
