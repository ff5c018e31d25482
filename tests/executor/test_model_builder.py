"""Models are built again and again from the same files."""

from __future__ import annotations

import pytest
import torch
from quire.executor.model_builder import ModelBuilder
from quire.ipc.errors import ModelLoadError
from quire.tests.executor.driver import make_config


def make_builder(model) -> ModelBuilder:
    config = make_config(model, dtype="float32")
    return ModelBuilder(config, torch.float32, torch.float32, torch.device("cpu"), "auto")


def test_a_builder_builds_equal_models(tiny):
    builder = make_builder(tiny())
    seen: list[tuple[str, float]] = []
    models = [
        builder.build(tiny(), lambda stage, fraction: seen.append((stage, fraction)))
        for _ in range(2)
    ]
    tokens = torch.arange(5, dtype=torch.int32)
    first, second = (model.embed_tokens(tokens) for model in models)
    assert torch.equal(first, second) and first.data_ptr() != second.data_ptr()
    assert builder.weights_bytes >= sum(tensor.nbytes for tensor in (first, second))
    assert seen and all(0.0 <= fraction <= 1.0 for _, fraction in seen)


def test_random_weights_depend_on_the_seed_alone(tiny):
    builder, tokens = make_builder(tiny()), torch.arange(5, dtype=torch.int32)
    first, second = (
        builder.build(None, lambda stage, fraction: None).embed_tokens(tokens) for _ in range(2)
    )
    assert torch.equal(first, second) and first.std() > 0


def test_a_directory_without_weights_is_refused(tiny, tmp_path):
    with pytest.raises(ModelLoadError):
        make_builder(tiny()).build(tmp_path, lambda stage, fraction: None)
