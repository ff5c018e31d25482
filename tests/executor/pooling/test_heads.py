"""Heads and Dense modules against torch, and a row's bits in every batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from quire.executor.pooling.dense import load_dense
from quire.executor.pooling.heads import ACTIVATIONS, LAST_ACTIVATIONS, filled_head
from quire.ipc.errors import ModelLoadError
from quire.ipc.models.forms import HeadLayer
from quire.ipc.models.pooling import Dense
from safetensors.torch import save_file

HEAD = (
    HeadLayer("dense", 48, 35, activation="gelu"),
    HeadLayer("norm", 35, 35, norm_eps=1e-5),
    HeadLayer("out", 35, 3, has_bias=False),
)


def tensors_of(head, seed=0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in layer.shapes()}
        for layer in head
    ]


def blocks_of(*counts: int) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.standard_normal((n, 48)).astype(np.float32) for n in counts]


def test_a_head_is_its_layers_one_after_the_other():
    tensors = tensors_of(HEAD)
    blocks = blocks_of(1, 4, 1)
    dense, norm, out = tensors
    for own, x in zip(filled_head(HEAD, tensors)(blocks), map(torch.from_numpy, blocks)):
        x = F.gelu(F.linear(x, dense["dense.weight"], dense["dense.bias"]))
        x = F.layer_norm(x, (35,), norm["norm.weight"], norm["norm.bias"], 1e-5)
        x = F.linear(x, out["out.weight"])
        np.testing.assert_allclose(own, x.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_batch_changes_no_bit(activation):
    head = (HeadLayer("dense", 48, 35, activation=activation), *HEAD[1:])
    head = filled_head(head, tensors_of(head))
    blocks = blocks_of(*[1] * 40, 7, 2)
    for block, own in zip(blocks, head(blocks)):
        assert head([block])[0].tobytes() == own.tobytes()


def test_the_last_activation_is_by_row():
    x = blocks_of(5)[0]
    right = {
        "identity": torch.from_numpy(x),
        "normalize": F.normalize(torch.from_numpy(x)),
        "sigmoid": torch.from_numpy(x).sigmoid(),
        "softmax": torch.from_numpy(x).softmax(-1),
    }
    assert right.keys() == LAST_ACTIVATIONS.keys()
    for name, activate in LAST_ACTIVATIONS.items():
        np.testing.assert_allclose(activate(x), right[name].numpy(), rtol=1e-6, atol=1e-7)


def test_dense_modules_are_read_from_their_folders(tmp_path):
    modules = (
        Dense(folder="2_Dense", in_features=48, out_features=5),
        Dense(
            folder="3_Dense", in_features=5, out_features=7, has_bias=False, activation="identity"
        ),
    )
    generator = torch.Generator().manual_seed(1)
    stored = []
    for module in modules:
        (tmp_path / module.folder).mkdir()
        shape = module.out_features, module.in_features
        tensors = {"linear.weight": torch.randn(shape, generator=generator)}
        if module.has_bias:
            tensors["linear.bias"] = torch.randn(shape[0], generator=generator)
        save_file(tensors, tmp_path / module.folder / "model.safetensors")
        stored.append(tensors)
    (block,) = blocks_of(2)
    x = torch.tanh(F.linear(torch.from_numpy(block), *stored[0].values()))
    right = F.linear(x, stored[1]["linear.weight"])
    np.testing.assert_allclose(load_dense(modules, tmp_path)([block])[0], right, rtol=1e-5)
    assert load_dense(modules, None)([block])[0].shape == (2, 7)
    wrong = Dense(folder="2_Dense", in_features=48, out_features=6)
    with pytest.raises(ModelLoadError, match=r"linear.weight: the model needs a tensor of \[6, 48"):
        load_dense([wrong], tmp_path)
    with pytest.raises(ModelLoadError, match=r"has no model.safetensors"):
        load_dense([Dense(folder="4_Dense", in_features=1, out_features=1)], tmp_path)
