"""JSON files of a model directory: any content is read or refused with one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from quire import LLM
from quire.executor.weights.draft_heads import HeadWeights
from quire.frontend.diagnosis.model import check_model
from quire.frontend.engine_args import EngineArgs
from quire.ipc import json_files
from quire.ipc.errors import ModelLoadError
from quire.ipc.json_files import MAX_NESTING, read_json, read_json_if_exists
from quire.ipc.models.gguf import read_gguf
from quire.tests.tiny_models import save_tiny_model


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


POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "model.gguf", "draft"]
)
def test_a_pointer_of_git_lfs_says_what_it_is(name: str, tmp_path: Path) -> None:
    """Whichever file of a model it stands for; also where the weights are a draft head's."""
    directory = save_tiny_model(tmp_path / "model")
    is_head = name == "draft"
    path = directory / ("model.safetensors" if is_head else name)
    path.write_text(POINTER)
    with pytest.raises(ModelLoadError) as caught:
        if is_head:
            HeadWeights(directory)
        elif name == "model.gguf":
            read_gguf(path)
        else:
            LLM(str(directory), engine="inproc")
    message = str(caught.value)
    assert f"{path} is a pointer of Git LFS" in message and "lfs pull" in message
    if not is_head:
        model = path if name == "model.gguf" else directory
        findings = list(check_model(EngineArgs(str(model))))
        assert any(one.status == "fail" and "Git LFS" in one.detail for one in findings)


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
