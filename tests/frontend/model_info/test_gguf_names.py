"""Names of GGUF files: on this machine, on the hub, and in its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from quire.frontend.model_info import gguf_names
from quire.frontend.model_info.gguf_names import HubFile, choose, parse_hub_name, quantization_of
from quire.frontend.model_info.model_files import find_cached_directory, find_model_directory
from quire.ipc.errors import ModelLoadError

FILES = [
    "README.md",
    "m-Q4_K_M.gguf",
    "m-UD-Q4_K_XL.gguf",
    "m-Q8_0-00001-of-00002.gguf",
    "m-Q8_0-00002-of-00002.gguf",
    "mmproj-m-f16.gguf",
    "big/m-BF16.gguf",
    "old/m.q6_k.gguf",
    "new/m.Q6_K.gguf",
]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/m:Q4_K_M", HubFile("org/m", quantization="Q4_K_M")),
        ("m:q8_0", HubFile("m", quantization="q8_0")),
        ("org/m/m-Q4_K_M.gguf", HubFile("org/m", file="m-Q4_K_M.gguf")),
        ("org/m/big/m.gguf", HubFile("org/m", file="big/m.gguf")),
        ("org/m", None),
        ("org/m.gguf", None),
        ("./a/b/m.gguf", None),
        ("/a/b/m.gguf", None),
        ("~/a/m:Q4_0", None),
        ("a/b/c:Q4_0", None),
        ("C:/m", None),
    ],
)
def test_names_of_the_hub(model: str, expected: HubFile | None) -> None:
    assert parse_hub_name(model) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("gemma-3-270m-q4_k_m.gguf", "Q4_K_M"),
        ("Qwen3-0.6B-UD-IQ2_XXS.gguf", "UD-IQ2_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("Q4_0/m-Q4_K_S-00001-of-00003.gguf", "Q4_K_S"),
        ("Qwen2-7B.gguf", None),
    ],
)
def test_quantizations(name: str, expected: str | None) -> None:
    assert quantization_of(name) == expected


def test_the_file_that_is_meant() -> None:
    assert choose(FILES, HubFile("org/m", quantization="q4_k_m")) == "m-Q4_K_M.gguf"
    assert choose(FILES, HubFile("org/m", quantization="bf16")) == "big/m-BF16.gguf"
    split = "m-Q8_0-00001-of-00002.gguf"
    assert choose(FILES, HubFile("org/m", quantization="Q8_0")) == split
    assert choose(FILES, HubFile("org/m", file="m-Q8_0-00002-of-00002.gguf")) == split


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (
            HubFile("org/m", quantization="Q2_K"),
            "model 'org/m' has no Q2_K; there are: BF16, Q4_K_M, Q6_K, Q8_0, UD-Q4_K_XL",
        ),
        (
            HubFile("org/m", quantization="Q6_K"),
            "has several Q6_K; name one of: org/m/new/m.Q6_K.gguf, org/m/old/m.q6_k.gguf",
        ),
        (HubFile("org/m", file="x.gguf"), "model 'org/m' has no x.gguf; there are: big/m-BF16"),
    ],
)
def test_what_is_not_there(wanted: HubFile, problem: str) -> None:
    with pytest.raises(ModelLoadError, match=problem):
        choose(FILES, wanted)
    with pytest.raises(ModelLoadError, match="has no GGUF file"):
        choose(["README.md"], wanted)


def test_folders(tmp_path: Path) -> None:
    def found() -> Path:
        return find_model_directory(str(tmp_path))

    assert found() == tmp_path
    for part in (1, 2):
        (tmp_path / f"m-0000{part}-of-00002.gguf").touch()
    first = tmp_path / "m-00001-of-00002.gguf"
    assert found() == first
    assert find_model_directory(str(tmp_path / "m-00002-of-00002.gguf")) == first
    (tmp_path / "n.gguf").touch()
    with pytest.raises(ModelLoadError, match="several models; name one of the files: m-00001-of"):
        found()
    (tmp_path / "model.safetensors").touch()
    assert found() == tmp_path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with one file of a repository, laid out as the hub's client does."""
    repository = tmp_path / "models--org--m"
    snapshot = repository / "snapshots" / ("a" * 40)
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "blobs" / "1234").touch()
    (snapshot / "m-Q4_K_M.gguf").symlink_to(repository / "blobs" / "1234")
    return tmp_path


def offline(*_: Any, **__: Any) -> Any:
    raise ConnectionError("no network\nmore lines")


def test_the_cache_needs_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link's name is kept: the blob's says nothing."""
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", offline)
    expected = cache / "models--org--m" / "snapshots" / ("a" * 40) / "m-Q4_K_M.gguf"
    for name in ("org/m:Q4_K_M", "org/m/m-Q4_K_M.gguf"):
        assert find_model_directory(name, download_dir=str(cache)) == expected
        assert find_cached_directory(name, download_dir=str(cache)) == expected
    with pytest.raises(ModelLoadError, match="has no Q8_0; there are: Q4_K_M"):
        find_model_directory("org/m:Q8_0", download_dir=str(cache))
    assert find_cached_directory("org/other:Q8_0", download_dir=str(cache)) is None
    with pytest.raises(ModelLoadError) as raised:
        find_model_directory("org/other:Q8_0", download_dir=str(cache))
    assert str(raised.value) == (
        "model 'org/other': it is not in the cache, and the hub did not provide it: no network"
    )


def test_all_parts_are_downloaded_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repository: str, **options: Any) -> str:
        asked.append((repository, options["revision"], options["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: FILES)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    path = find_model_directory("org/m:Q8_0", revision="v1")
    assert path == tmp_path / "m-Q8_0-00001-of-00002.gguf"
    parts = ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
    assert asked == [("org/m", "v1", [*parts, *gguf_names.BESIDE])]


def test_a_repository_of_gguf_files_needs_a_quantization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: FILES[:3])
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ModelLoadError, match="name one of them: org/m:Q4_K_M, org/m:UD-Q4_K_XL"):
        find_model_directory("org/m")
