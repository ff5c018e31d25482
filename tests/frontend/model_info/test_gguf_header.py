"""plan and doctor describe a GGUF file on the hub by its header; the hub is a local server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from quire import EngineArgs, ModelLoadError
from quire.frontend.diagnosis.model import check_model
from quire.frontend.model_info import gguf_header
from quire.frontend.model_info.gguf_header import find_description, is_header_only
from quire.frontend.model_info.model_files import find_model_directory
from quire.frontend.model_info.model_pull import DownloadError
from quire.frontend.model_info.plan import make_plan
from quire.ipc.models.gguf import read_gguf
from quire.tests.fake_hub import FakeHub, fake_hub, use_hub
from quire.tests.gguf_checkpoints import write_gguf
from quire.tests.gguf_files import gguf_bytes

MODEL = "org/g:Q8_0"


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "bundled.gguf"
    write_gguf(path, find_model_directory("bundled"), "Q8_0")
    return path.read_bytes()


@pytest.fixture
def hub(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr(gguf_header, "FIRST_BYTES", 4096)
    with fake_hub() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        hub.files["org/g"] = {
            "g-Q8_0.gguf": content,
            "g-Q4_0.gguf": b"other",
            "generation_config.json": b'{"temperature": 0.25}',
        }
        yield hub


def test_only_the_header_is_received(content: bytes, hub: FakeHub, tmp_path: Path) -> None:
    path = find_description(EngineArgs(MODEL))
    assert is_header_only(path) and path.stat().st_size == len(content)
    first, described = tmp_path / "whole.gguf", read_gguf(path)
    first.write_bytes(content)
    whole = read_gguf(first)
    assert described.metadata == whole.metadata
    assert [t[:3] + t[4:] for t in described.tensors.values()] == [
        t[:3] + t[4:] for t in whole.tensors.values()
    ]
    ranges = [asked[2] for asked in hub.asked if asked[1] == "g-Q8_0.gguf"]
    assert ranges[:2] == ["bytes=0-4095", "bytes=0-16383"]
    start = min(tensor.offset for tensor in whole.tensors.values())
    received = int(str(ranges[-1]).partition("-")[2]) + 1
    assert start <= received < 4 * start < len(content)
    assert path.read_bytes()[received:] == bytes(len(content) - received)
    assert (path.parent / "generation_config.json").read_text() == '{"temperature": 0.25}'


def test_plan_and_doctor(content: bytes, hub: FakeHub, tmp_path: Path) -> None:
    first = tmp_path / "whole.gguf"
    first.write_bytes(content)
    planned, whole = (make_plan(EngineArgs(model)) for model in (MODEL, str(first)))
    assert planned.weights_bytes == whole.weights_bytes
    assert planned.num_parameters == whole.num_parameters
    findings = {finding.name: finding for finding in check_model(EngineArgs(MODEL))}
    weights = findings["weights"]
    assert (weights.status, weights.fix[: len(f"quire pull {MODEL}")]) == (
        "warn",
        f"quire pull {MODEL}",
    )
    assert weights.detail.endswith("GiB in GGUF files on the hub")
    assert "fail" not in {finding.status for finding in findings.values()}
    assert not list((tmp_path / "hub").rglob("*.gguf"))


def test_parts_and_factors(hub: FakeHub) -> None:
    """Each part has a header; the rotary factors are configuration that is stored as a tensor."""
    factors = bytes(range(16))
    parts = [
        gguf_bytes({"split.count": 2, "n": 0}, {"a": ((5000,), "F32", bytes(20_000))}),
        gguf_bytes(
            {"split.count": 2},
            {"b": ((9000,), "F32", bytes(36_000)), "rope_freqs.weight": ((4,), "F32", factors)},
        ),
    ]
    names = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    hub.files["org/s"] = dict(zip(names, parts))
    file = read_gguf(find_description(EngineArgs(f"org/s/{names[1]}")))
    assert [path.name for path in file.paths] == names and set(file.tensors) == {
        "a",
        "b",
        "rope_freqs.weight",
    }
    place = file.tensors["rope_freqs.weight"]
    assert place.path.read_bytes()[place.offset :][:16] == factors


def test_refusals(hub: FakeHub) -> None:
    with pytest.raises(ModelLoadError, match="has no Q5_K; there are: Q4_0, Q8_0"):
        find_description(EngineArgs("org/g:Q5_K"))
    with pytest.raises(ModelLoadError, match="not a readable GGUF file"):
        find_description(EngineArgs("org/g:Q4_0"))
    hub.gated.add("org/g")
    with pytest.raises((ModelLoadError, DownloadError), match="gated"):
        find_description(EngineArgs(MODEL))


def test_a_hub_without_ranges(content: bytes, hub: FakeHub) -> None:
    hub.has_ranges = False
    path = find_description(EngineArgs(MODEL))
    assert path.stat().st_size == len(content)
    assert read_gguf(path).metadata["general.architecture"] == "qwen2"
