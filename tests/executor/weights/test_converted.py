"""Checkpoints whose tensors have other names or shapes than the model's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from quire.executor.weights.converted import load_converted_weights
from quire.ipc.errors import ModelLoadError
from safetensors.torch import save_file


@dataclass
class Stack:
    sources: list[str]
    target: str
    is_plain: bool = False

    def convert(self, values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {self.target: torch.stack(values) if len(values) > 1 else values[0]}


class Model:
    """Two experts in one tensor, and a renamed vector."""

    def __init__(self) -> None:
        self.experts, self.norm = torch.zeros(2, 3, 4), torch.zeros(4)

    def weights(self):
        yield from {"experts": self.experts, "norm": self.norm}.items()

    def tied_weights(self) -> dict[str, str]:
        return {}

    def plan_conversions(self, stored: list[str]) -> list[Stack]:
        plain = [Stack([name], "norm") for name in stored if name == "old.norm"]
        return [Stack([n for n in stored if n.startswith("expert.")], "experts"), *plain]


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "expert.0": torch.randn(3, 4),
        "expert.1": torch.randn(3, 4),
        "old.norm": torch.randn(4),
    }


def load(directory: Path, model: Model) -> list[float]:
    reported: list[float] = []
    load_converted_weights(
        model, directory, lambda stage, fraction: reported.append(fraction), torch.Tensor.copy_
    )
    return reported


def test_tensors_of_several_names_become_one(tmp_path):
    values = tensors()
    save_file(values, tmp_path / "model.safetensors")
    model = Model()
    assert load(tmp_path, model)[-1] == 1.0
    assert torch.equal(model.experts, torch.stack([values["expert.0"], values["expert.1"]]))
    assert torch.equal(model.norm, values["old.norm"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"old.norm": None}, "no file has the tensor norm"),
        ({"expert.2": torch.zeros(3, 4)}, r"expert.0 has shape \[3, 3, 4\]"),
        ({"old.norm": torch.zeros(4, dtype=torch.int32)}, "old.norm is of type I32"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(change, words, tmp_path):
    values = {k: v for k, v in (tensors() | change).items() if v is not None}
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=words):
        load(tmp_path, Model())
