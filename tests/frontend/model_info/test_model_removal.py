"""Removal from a hub cache: a repository, one GGUF model of several, what others share."""

from __future__ import annotations

from pathlib import Path

import pytest
from quire.frontend.model_info.model_removal import find_removal
from quire.ipc.errors import ModelLoadError

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two snapshots. Q4_0 is the same in both, and Q8_0 has two parts."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--org--g"
    (folder / "blobs").mkdir(parents=True)
    (tmp_path / ".locks" / "models--org--g").mkdir(parents=True)
    for snapshot, name, blob in (
        (OLD, "m-Q4_0.gguf", "four"),
        (NEW, "m-Q4_0.gguf", "four"),
        (NEW, "m-Q8_0-00001-of-00002.gguf", "one"),
        (NEW, "m-Q8_0-00002-of-00002.gguf", "two"),
        (NEW, "other-Q4_K_M.gguf", "two"),
    ):
        link = folder / "snapshots" / snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        (folder / "blobs" / blob).write_bytes(bytes(100))
        link.symlink_to(Path("../../blobs") / blob)
    return folder


def blobs(folder: Path) -> set[str]:
    return {path.name for path in (folder / "blobs").iterdir()}


def test_one_model_of_several(folder: Path) -> None:
    removal = find_removal("org/g:q8_0")
    assert removal.num_bytes == 100  # the other blob is also another model's
    removal.run()
    assert blobs(folder) == {"four", "two"}
    names = {path.name for path in (folder / "snapshots" / NEW).iterdir()}
    assert names == {"m-Q4_0.gguf", "other-Q4_K_M.gguf"}
    find_removal("org/g:Q4_0").run()  # from both snapshots
    assert blobs(folder) == {"two"} and not list((folder / "snapshots" / OLD).iterdir())
    last = find_removal("org/g:Q4_K_M")
    assert last.paths[0] == folder
    last.run()
    assert not folder.exists()


def test_a_repository(folder: Path) -> None:
    (folder / "blobs" / "five.incomplete").write_bytes(bytes(7))
    removal = find_removal("org/g")
    assert removal.num_bytes == 307
    removal.run()
    assert not folder.exists() and not list((folder.parent / ".locks").iterdir())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/none", "is not in .*; `quire models` lists what is"),
        ("org/g:Q2_K", "has no Q2_K; there are: "),
        ("bundled", "cannot be removed"),
        ("../..", "is not in"),
        ("/etc", "is not in"),
        (".", "is not in"),
    ],
)
def test_what_is_not_there(folder: Path, model: str, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        find_removal(model)
    assert blobs(folder) == {"four", "one", "two"}
