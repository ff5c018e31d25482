"""The factory and its layers: merged projections, names of weights, packing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from quire.executor.models.layers import LayerFactory
from quire.ipc.models.decoder_config import parse_decoder_config
from quire.kernels import registry
from quire.tests.ipc.models.test_decoder_config import MINIMAL


def make_factory(dtype: torch.dtype = torch.float32) -> LayerFactory:
    return LayerFactory(registry.select("cpu", dtype), dtype, torch.device("cpu"))


def fill(make: LayerFactory, layer) -> dict[str, torch.Tensor]:
    """Fill the tensors with random values as the loader does, and release the memory of the values.
    Return copies of them.
    """
    generator = torch.Generator().manual_seed(0)
    copies = {}
    for name, tensor in layer.weights("p."):
        copies[name] = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        make.fill(tensor, copies[name].clone())
    return copies


def test_a_merged_linear_is_its_shards_side_by_side():
    make = make_factory()
    layer = make.linear(32, {"q_proj": 16, "k_proj": 8, "v_proj": 8}, bias=True)
    weights = fill(make, layer)
    assert list(weights) == [
        f"p.{name}_proj.{kind}" for name in "qkv" for kind in ("weight", "bias")
    ]
    x = torch.randn(5, 32)
    expected = torch.cat(
        [
            F.linear(x, weights[f"p.{name}_proj.weight"], weights[f"p.{name}_proj.bias"])
            for name in "qkv"
        ],
        dim=-1,
    )
    torch.testing.assert_close(layer(x), expected)


def test_a_linear_is_packed_and_its_weight_freed_after_its_last_tensor():
    make = make_factory()
    layer = make.linear(32, {"q_proj": 16, "k_proj": 8}, bias=True)
    table = dict(layer.weights(""))
    for name, tensor in table.items():
        assert layer._weight is not None, name
        make.fill(tensor, torch.zeros(tensor.shape))
    assert layer._weight is None and (layer(torch.ones(1, 32)) == 0).all()


@pytest.mark.parametrize(
    "rows",
    [{"q_proj": 48, "k_proj": 16, "v_proj": 24}, {"q_proj": 40, "k_proj": 8, "v_proj": 8}],
    ids=str,
)
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_packing_shards_equals_packing_the_whole_layer(quantization, rows):
    """Shards are packed from the file's memory (if in the model's dtype), from the layer's own
    memory (if in another), or from both.
    """
    results = []
    for stored in (
        [torch.bfloat16] * 3,
        [torch.float32] * 3,
        [torch.bfloat16, torch.float32, torch.bfloat16],
    ):
        make = LayerFactory(
            registry.select("cpu", torch.bfloat16),
            torch.bfloat16,
            torch.device("cpu"),
            quantization,
        )
        layer, generator = make.linear(70, rows, bias=True), torch.Generator().manual_seed(1)
        for i, (_, tensor) in enumerate(layer.weights("")):
            make.fill(
                tensor, torch.randn(tensor.shape, generator=generator).bfloat16().to(stored[i // 2])
            )
        results.append(layer(torch.randn(5, 70, generator=generator).bfloat16()))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_row_linear_and_bias():
    make = make_factory()
    plain, biased = (
        make.row_linear("o_proj", 16, 32),
        make.row_linear("down_proj", 16, 32, bias=True),
    )
    assert list(fill(make, plain)) == ["p.o_proj.weight"] and list(fill(make, biased)) == [
        "p.down_proj.weight",
        "p.down_proj.bias",
    ]
    assert plain(torch.randn(3, 16)).shape == biased(torch.randn(3, 16)).shape == (3, 32)


def test_a_tied_head_is_the_embedding():
    make = make_factory(torch.bfloat16)
    embedding = make.embedding("embed_tokens", 48, 32, head="lm_head")
    head = make.tied_head(embedding)
    weight = fill(make, embedding)["p.embed_tokens.weight"]
    hidden = torch.randn(2, 32).bfloat16()
    torch.testing.assert_close(head(hidden), F.linear(hidden, weight))
    assert torch.equal(embedding(torch.tensor([47, 0], dtype=torch.int32)), weight[[47, 0]])


def test_a_tied_table_is_stored_once_if_the_packed_head_provides_its_rows():
    weights = {}
    on_cpu = registry.Facts("cpu", torch.bfloat16)
    for implementation in (
        i for i in registry.implementations("pack_linear") if i.predicate(on_cpu)
    ):
        make = LayerFactory(
            registry.select("cpu", torch.bfloat16, {"pack_linear": implementation.name}),
            torch.bfloat16,
            torch.device("cpu"),
        )
        embedding = make.embedding("embed_tokens", 50, 31, head="lm_head")
        table = fill(make, embedding)["p.embed_tokens.weight"]
        assert torch.equal(
            embedding(torch.tensor([49, 0, 17], dtype=torch.int32)), table[[49, 0, 17]]
        ), implementation.name
        weights[implementation.name] = embedding._weight
    assert weights["reference"] is not None and weights.get("native") is None


def test_norm_and_its_fused_form():
    make = make_factory()
    config = parse_decoder_config({**MINIMAL, "rms_norm_eps": 1e-5})
    norm = make.norm("norm", 32, config)
    weight = fill(make, norm)["p.norm.weight"]
    x, residual = torch.randn(4, 32), torch.randn(4, 32)
    total = x + residual
    expected = F.rms_norm(total, (32,), weight, 1e-5)
    torch.testing.assert_close(norm(total), expected)
    norm.add(x, residual)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(x, expected)
