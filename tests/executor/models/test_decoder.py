"""The shared decoder stack: its weight names are the checkpoint's, its layers have
separate caches.
"""

from __future__ import annotations

import json

import pytest
import torch
from quire.executor.models import find_model
from quire.executor.models.layers import LayerFactory
from quire.ipc.models.ranks import head_in_layers
from quire.ipc.models.stacked_experts import stacked_pieces
from quire.ipc.models.stored_names import is_ignored
from quire.kernels import registry
from quire.tests.tiny_models import KINDS
from safetensors import safe_open


@pytest.mark.sampled(step=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}], ids=["untied", "tied"])
def test_weight_names_are_those_that_transformers_saves(kind, overrides, tiny):
    directory = tiny(kind, **overrides)
    hf_config = json.loads((directory / "config.json").read_text())
    found = find_model(hf_config)
    make = LayerFactory(registry.select("cpu", torch.float32), torch.float32, torch.device("cpu"))
    model = found.build(found.parse_config(hf_config), make, 64)
    table = list(model.weights())
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in list(file.keys())}
    stored = {name: stored[name] for name in stored if not is_ignored(name, model.config)}
    shapes = {name: list(tensor.shape) for name, tensor in table}
    assert len(shapes) == len(table)
    pieces = stacked_pieces(shapes)
    loaded = {}
    for name, shape in shapes.items():
        if name not in stored:  # an expert, which lies in a tensor of all experts
            name, shape = pieces[name].stored, pieces[name].shape
        loaded[name] = tuple(shape)
    assert loaded == stored
    tied = list(model.tied_weights())
    assert tied == (["lm_head.weight"] if model.config.tie_word_embeddings else [])
    num_layers = len(model.config.cache_layers)
    assert len(model.attention_layers()) == num_layers
    assert len(set(map(id, model.attention_layers()))) == num_layers


@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
def test_the_head_in_layers(kind, tiny) -> None:
    """Half of its weights beside those that a token multiplies in a layer."""
    hf_config = json.loads((tiny(kind) / "config.json").read_text())
    shape = find_model(hf_config).parse_config(hf_config)
    size, kv_width = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
    attention = 2 * size * (shape.num_attention_heads * shape.head_dim + kv_width)
    inner = shape.intermediate_size
    if shape.experts is not None:
        inner = shape.experts.per_token * shape.experts.size
    layer = attention + 3 * size * inner
    assert head_in_layers(shape) == shape.vocab_size * size / layer / 2
