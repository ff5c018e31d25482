"""Which models of a catalogue run: configurations in files, directories and a fake hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from quire.frontend.model_info import catalogue
from quire.frontend.model_info.catalogue import (
    IN_TRANSFORMERS,
    NATIVELY,
    NOT,
    NOT_HERE,
    UNKNOWN,
    judge,
    read_catalogue,
)
from quire.frontend.model_info.model_pull import DownloadError
from quire.ipc.errors import ModelLoadError
from quire.ipc.models import fallback_architectures
from quire.ipc.models.fallback_architectures import choose_implementation
from quire.tests.fake_hub import FakeHub, fake_hub, use_hub
from quire.tests.gguf_files import write_gguf

SIZES = {
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SIZES
STARCODER = {"architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2"} | SIZES
BLOOM = {"architectures": ["BloomForCausalLM"], "model_type": "bloom"} | SIZES
CONFIGS = {"llama": LLAMA, "starcoder": STARCODER, "bloom": BLOOM}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as hub:
        use_hub(hub, tmp_path / "hub", monkeypatch)
        yield hub


def test_names_of_a_catalogue() -> None:
    assert read_catalogue("# mine\n\n org/a \norg/b:Q4_K_M\r\n./c d\n") == [
        "org/a",
        "org/b:Q4_K_M",
        "./c d",
    ]


def test_configurations_of_every_kind(tmp_path: Path) -> None:
    names = []
    for name, config in CONFIGS.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        names.append(str(tmp_path / f"{name}.json"))
    directory = tmp_path / "some"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    names += [str(directory), "bundled"]
    found = judge(names)
    assert [verdict.model for verdict in found] == names
    assert [(v.runs, v.architecture, v.model_type) for v in found] == [
        (NATIVELY, "LlamaForCausalLM", "llama"),
        (IN_TRANSFORMERS, "Starcoder2ForCausalLM", "starcoder2"),
        (NOT, "BloomForCausalLM", "bloom"),
        (NATIVELY, "LlamaForCausalLM", "llama"),
        (NATIVELY, "Qwen2ForCausalLM", "qwen2"),
    ]
    assert [bool(verdict.reason) for verdict in found] == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bloom", {}),
        ("llama", {"architectures": ["NovelForCausalLM"], "model_type": "novel"}),
        ("llama", {"architectures": None, "model_type": None}),
        ("llama", {"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax"}),
    ],
)
def test_reasons_are_the_engines(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    config = CONFIGS[name] | change
    with pytest.raises(ModelLoadError) as refused:
        choose_implementation(config, "auto")
    path = tmp_path / "a.json"
    path.write_text(json.dumps(config))
    (verdict,) = judge([str(path)])
    assert verdict.runs == NOT and verdict.reason
    assert str(refused.value).startswith(verdict.reason)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (json.dumps(LLAMA | {"hidden_size": -1}), "hidden_size"),
        (json.dumps(STARCODER | {"vocab_size": "x"}), "vocab_size"),
        (json.dumps(LLAMA | {"quantization_config": {"quant_method": "odd"}}), "odd"),
        ("{", "cannot be read"),
        ("[]", "object"),
    ],
)
def test_a_configuration_that_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    for name in (path, tmp_path):
        (verdict,) = judge([str(name)])
        assert verdict.runs == NOT and reason in verdict.reason


def test_gguf_files(tmp_path: Path) -> None:
    odd = write_gguf(tmp_path / "odd.gguf", {"general.architecture": "bloom"}, {})
    (verdict,) = judge([str(odd)])
    assert (verdict.runs, verdict.architecture) == (NOT, None)
    assert verdict.reason == "general.architecture 'bloom' is not supported"


def test_a_new_row_changes_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BLOOM))
    row = fallback_architectures.Fallback("BloomForCausalLM")
    monkeypatch.setitem(fallback_architectures.FALLBACKS, "bloom", row)
    assert judge([str(path)])[0].runs == IN_TRANSFORMERS


def test_the_hub_is_asked_only_on_request(hub: FakeHub) -> None:
    hub.files = {
        "org/llama": {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": b"x" * 2000},
        "org/files": {"README.md": b"x"},
    }
    names = ["org/llama", "org/files", "org/none", "./none"]
    found = judge(names)
    assert [(v.runs, v.reason) for v in found] == [(UNKNOWN, NOT_HERE)] * 4 and not hub.asked
    first, *others = judge(names, downloads=True)
    assert (first.runs, first.architecture) == (NATIVELY, "LlamaForCausalLM")
    assert [verdict.runs for verdict in others] == [UNKNOWN] * 3
    assert "org/files' has no config.json" in others[0].reason
    assert "org/none" in others[1].reason and "./none" in others[2].reason
    assert not any("safetensors" in path for _, path, _ in hub.asked)
    hub.asked.clear()
    assert judge(names)[0] == first and not hub.asked  # from the cache


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def find(model: str, downloads: bool) -> None:
        if downloads:
            asked.append(model)
            raise DownloadError("the hub cannot be reached")

    monkeypatch.setattr(catalogue, "_find", find)
    found = judge(["a", "b", "c"], downloads=True)
    assert [verdict.reason for verdict in found] == [
        "the hub cannot be reached",
        *[NOT_HERE] * 2,
    ]
    assert asked == ["a"]


def test_verdicts_are_all_of_the_stated_kinds() -> None:
    assert catalogue.RUNS == (NATIVELY, IN_TRANSFORMERS, NOT, UNKNOWN)
