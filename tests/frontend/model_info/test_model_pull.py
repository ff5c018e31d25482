"""Downloads from a local server with the hub's endpoints: what is received, resumed and refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire.frontend.model_info.model_files import find_cached_directory
from quire.frontend.model_info.model_pull import (
    CHUNK_BYTES,
    DownloadError,
    HubBlob,
    find_wanted,
    needed_names,
    pull,
)
from quire.ipc.errors import ModelLoadError
from quire.tests.fake_hub import FakeHub, fake_hub, use_hub

WEIGHTS = os.urandom(3 * CHUNK_BYTES + 5)
PARTS = [f"q/m-Q8_0-0000{part}-of-00002.gguf" for part in (1, 2)]
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": WEIGHTS,
    "consolidated.safetensors": WEIGHTS,
    "onnx/config.json": b"{}",
    "README.md": b"",
}


class Log:
    """A PullProgress that adds up."""

    def __init__(self) -> None:
        self.there: dict[str, int] = {}
        self.num_received = 0

    def begin(self, blob: HubBlob, num_bytes_there: int) -> None:
        self.there[blob.name] = num_bytes_there

    def add(self, num_bytes: int) -> None:
        self.num_received += num_bytes


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        hub.files["org/m"] = dict(FILES)
        hub.files["org/g"] = {name: os.urandom(2000) for name in (*PARTS, "m-Q4_K_M.gguf")}
        yield hub


def pulled(model: str, *, verify: bool = False) -> tuple[Path, Log, list[str]]:
    log, damaged = Log(), []
    path = pull(
        find_wanted(model), log, verify=verify, on_damaged=lambda blob: damaged.append(blob.name)
    )
    return path, log, damaged


def test_only_what_is_needed(hub: FakeHub) -> None:
    path, log, _ = pulled("org/m")
    names = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {file.name for file in path.iterdir()} == names == set(log.there)
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert log.num_received == len(WEIGHTS) + 4
    asked = [words for words in hub.asked if words[0] == "GET"]
    assert len(asked) == 3  # the client received nothing a second time
    _, again, _ = pulled("org/m")
    assert again.num_received == 0 and again.there["model.safetensors"] == len(WEIGHTS)
    assert find_cached_directory("org/m") == path


def test_all_parts_of_one_quantization(hub: FakeHub) -> None:
    path, log, _ = pulled("org/g:Q8_0")
    assert path.name == "m-Q8_0-00001-of-00002.gguf" and set(log.there) == set(PARTS)
    # the cache alone finds it, although the repository has further files
    assert find_cached_directory("org/g:Q8_0") == path
    with pytest.raises(ModelLoadError, match="no Q2_K; there are: Q4_K_M, Q8_0"):
        find_wanted("org/g:Q2_K")
    with pytest.raises(ModelLoadError, match="name one of them: org/g:Q4_K_M, org/g:Q8_0"):
        find_wanted("org/g")
    del hub.files["org/g"][PARTS[1]]
    with pytest.raises(ModelLoadError, match="has no q/m-Q8_0-00002-of-00002.gguf, a part of"):
        find_wanted("org/g:Q8_0")


def test_broken_connections_are_continued(hub: FakeHub) -> None:
    hub.breaks_after = [CHUNK_BYTES, CHUNK_BYTES]
    path, log, _ = pulled("org/m")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert log.num_received == len(WEIGHTS) + 4
    ranges = [asked[2] for asked in hub.asked if asked[:2] == ("GET", "model.safetensors")]
    assert ranges == [None, f"bytes={CHUNK_BYTES}-", f"bytes={2 * CHUNK_BYTES}-"]


def test_a_hub_that_breaks_each_time(hub: FakeHub) -> None:
    hub.breaks_after = [CHUNK_BYTES, 0, 0, 0]
    with pytest.raises(DownloadError, match="the hub cannot be reached: peer closed"):
        pulled("org/m")
    _, log, _ = pulled("org/m")  # a later call continues
    assert log.there["model.safetensors"] == CHUNK_BYTES
    assert log.num_received == len(WEIGHTS) - CHUNK_BYTES + 2


def test_a_server_without_ranges(hub: FakeHub) -> None:
    hub.breaks_after, hub.has_ranges = [CHUNK_BYTES], False
    path, log, _ = pulled("org/m")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert log.num_received == len(WEIGHTS) + 4


def test_damage_on_the_way(hub: FakeHub) -> None:
    hub.damaged = {"model.safetensors"}
    with pytest.raises(DownloadError, match="model.safetensors was received damaged: its checksum"):
        pulled("org/m")
    hub.damaged = {"tokenizer.json"}  # a small file, which has a SHA-1
    with pytest.raises(DownloadError, match="tokenizer.json was received damaged"):
        pulled("org/m")
    hub.damaged.clear()
    path, _, _ = pulled("org/m")
    assert (path / "model.safetensors").read_bytes() == WEIGHTS


def test_damage_in_the_cache(hub: FakeHub) -> None:
    path, _, _ = pulled("org/m")
    weights = path / "model.safetensors"
    with weights.open("r+b") as file:
        file.write(bytes([WEIGHTS[0] ^ 1]))
    assert pulled("org/m")[1].num_received == 0  # not looked for
    _, log, damaged = pulled("org/m", verify=True)
    assert damaged == ["model.safetensors"] and log.num_received == len(WEIGHTS)
    assert weights.read_bytes() == WEIGHTS
    assert pulled("org/m", verify=True)[1:][1] == []


def test_disk_space_is_checked_before_the_download(hub: FakeHub) -> None:
    hub.sizes["model.safetensors"] = 2**60
    with pytest.raises(DownloadError, match=r"needs 1073741824\.00 GiB more on disk, and .* free"):
        pulled("org/m")
    assert hub.asked == []


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("org/none", None, "no repository 'org/none' that is open to you; if it is private, log"),
        ("org/m", "v9", "has no revision 'v9'"),
        ("a b", None, "is not a name on the hub"),
        (".", None, "is a path"),
    ],
)
def test_what_there_is_not(hub: FakeHub, model: str, revision: str | None, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        find_wanted(model, revision)


def test_a_gated_repository(hub: FakeHub) -> None:
    hub.gated.add("org/m")
    with pytest.raises(ModelLoadError, match="accept its terms at .*/org/m, then log in with `hf"):
        pulled("org/m")


def test_no_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE is set"):
        find_wanted("org/m")


def test_a_repository_without_weights() -> None:
    with pytest.raises(ModelLoadError, match="no \\*.safetensors file and no GGUF file"):
        needed_names("org/m", ["pytorch_model.bin", "config.json"], None)
