"""torch.ops.quire.* computes what the operations compute."""

import pytest
import quire.kernels.torch_ops as torch_ops
import torch
from quire.kernels import ops, registry
from quire.kernels.ops import make_metadata


def test_all_but_those_that_schemas_do_not_express_are_there():
    own = [op for op in registry.CONTRACTS if registry.CONTRACTS[op].__module__.startswith("quire")]
    missing = [op for op in own if not hasattr(torch.ops.quire, op)]
    assert missing == ["fused_moe", "pack_linear", "pack_quantized_linear", "pack_gguf_linear"]


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
