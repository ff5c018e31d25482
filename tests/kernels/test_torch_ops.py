"""torch.ops.quire.* computes what the operations compute."""

import gc

import pytest
import quire.kernels.torch_ops as torch_ops
import torch
from quire.kernels import ops, registry
from quire.kernels.moe import Experts
from quire.kernels.ops import make_metadata


def test_all_but_those_that_schemas_do_not_express_are_there():
    own = [op for op in registry.CONTRACTS if registry.CONTRACTS[op].__module__.startswith("quire")]
    missing = [op for op in own if not hasattr(torch.ops.quire, op)]
    assert set(missing) == {
        *("expert_outputs", "weighted_sum"),  # of fused_moe
        *("pack_linear", "pack_quantized_linear", "pack_gguf_linear", "pack_head_linear"),
        *("latent_attention", "short_conv", "gated_delta_rule", "selective_scan"),
        "change_logits",
    }


def test_results_are_the_operations():
    x, weight, residual = torch.randn(5, 64), torch.randn(64), torch.randn(5, 64)
    assert torch.equal(torch.ops.quire.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6))
    mine, own = residual.clone(), residual.clone()
    assert torch.ops.quire.add(x, mine) is None
    ops.add(x, own)
    assert torch.equal(mine, own) and not torch.equal(mine, residual)


def test_attention_takes_the_tensors_of_its_metadata():
    query = torch.randn(3, 2, 16)
    caches = torch.randn(2, 4, 16, 1, 16).unbind()
    starts, lens = torch.tensor([0, 1, 3]).int(), torch.tensor([5, 9]).int()
    tables = torch.tensor([[1], [2]]).int()
    metadata = make_metadata(
        starts, lens, (tables,), (torch.zeros(3, dtype=torch.int64),), 0, [1, 2], [5, 9]
    )
    expected = ops.paged_attention(query, *caches, metadata, 0.25)
    result = torch.ops.quire.paged_attention(query, *caches, starts, lens, tables, 0.25)
    torch.testing.assert_close(result, expected)


@pytest.fixture
def num_packed(monkeypatch):
    """How often weights were packed, by the number of bits; 16: not quantized."""
    counts = {16: 0, 8: 0, 4: 0}
    pack_linear, pack_quantized_linear = ops.pack_linear, ops.pack_quantized_linear

    def count_linear(weight, bias):
        counts[16] += 1
        return pack_linear(weight, bias)

    def count_quantized(weight, bias, bits):
        counts[bits] += 1
        return pack_quantized_linear(weight, bias, bits)

    monkeypatch.setattr(ops, "pack_linear", count_linear)
    monkeypatch.setattr(ops, "pack_quantized_linear", count_quantized)
    return counts


def test_a_weight_is_packed_once_until_it_changes_or_is_gone(num_packed):
    x, weight, bias = torch.randn(3, 256), torch.randn(32, 256), torch.randn(32)
    expected = ops.pack_linear(weight, bias)(x)
    num_packed[16] = 0
    for _ in range(2):
        assert torch.equal(torch.ops.quire.linear(x, weight, bias), expected)
        for bits in (8, 4):
            quantized = ops.pack_quantized_linear(weight, None, bits)(x)
            assert torch.equal(torch.ops.quire.quantized_linear(x, weight, bits), quantized)
    assert num_packed == {16: 1, 8: 3, 4: 3}  # twice each for `quantized`
    weight.mul_(2)
    torch.testing.assert_close(torch.ops.quire.linear(x, weight, bias), 2 * expected - bias)
    assert num_packed[16] == 2
    other = torch.zeros(32)
    torch.testing.assert_close(torch.ops.quire.linear(x, weight, other), 2 * (expected - bias))
    size = len(torch_ops._packed)
    del weight
    gc.collect()
    assert len(torch_ops._packed) == size - 1


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_fused_moe_takes_stacked_weights(num_packed, activation):
    x, gate_up, down = torch.randn(5, 32), torch.randn(4, 48, 32), torch.randn(4, 32, 24)
    ids = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1]]).int()
    weights = torch.rand(5, 2)
    stacks = ([ops.pack_linear(weight, None) for weight in stack] for stack in (gate_up, down))
    expected = ops.fused_moe(x, ids, weights, Experts(*stacks, activation))
    num_packed[16] = 0
    for _ in range(2):
        result = torch.ops.quire.fused_moe(x, ids, weights, gate_up, down, activation)
        assert torch.equal(result, expected)
    assert num_packed[16] == 8


def test_a_plugins_operation_can_be_defined():
    @registry.operation
    def twice_for_torch(x: torch.Tensor) -> torch.Tensor:
        """x [T] -> 2 x"""

    try:
        registry.register("twice_for_torch", name="reference", priority=0)(lambda x: 2 * x)
        torch_ops.define("twice_for_torch")
        assert torch.equal(torch.ops.quire.twice_for_torch(torch.ones(2)), torch.full((2,), 2.0))
        with pytest.raises(ValueError, match="there is an operation 'twice_for_torch' already"):
            registry.operation(twice_for_torch)
    finally:
        registry.withdraw("twice_for_torch")
    with pytest.raises(ValueError, match="unknown operation"):
        registry.implementations("twice_for_torch")
