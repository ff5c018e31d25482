"""Routing against plain formulas, and experts that no token, every token or all tokens choose."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quire.kernels import ops, registry
from quire.kernels.moe import Experts
from quire.kernels.reference import moe as reference
from quire.kernels.reference.quantized import fused
from quire.tests.kernels.cases import random_blocks
from quire.tests.kernels.implementations import each
from quire.tests.kernels.moe_cases import CLAMPED, experts_of, packed, random_ids
from torch import Tensor

PLAIN = {"bias": None, "scale": 1.0, "num_groups": 1, "top_groups": 1}


def sorted_by_id(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(-1)
    return ids.gather(1, order), weights.gather(1, order)


def check(result: tuple[Tensor, Tensor], ids: Tensor, weights: Tensor) -> None:
    """Compares with ids and weights of the formula, in descending order of the choice."""
    assert result[0].dtype == torch.int32 and result[1].dtype == torch.float32
    assert torch.equal(result[0], ids.int())
    torch.testing.assert_close(result[1], weights, rtol=1e-6, atol=1e-7)


@each("route_experts")
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 8, 2), (70, 128, 8), (9, 60, 4), (5, 3, 3), (0, 4, 1)]
)
def test_softmax_with_and_without_renormalising(route_experts, tokens, experts, top_k):
    """As Qwen3-MoE and OLMoE do; and the softmax of the chosen logits, as gpt-oss does."""
    torch.manual_seed(0)
    logits = 3 * torch.randn(tokens, experts)
    values, ids = logits.softmax(-1).topk(top_k)
    plain = route_experts(logits, top_k=top_k, scoring="softmax", renormalize=False, **PLAIN)
    check(plain, ids, values)
    normal = route_experts(logits, top_k=top_k, scoring="softmax", renormalize=True, **PLAIN)
    check(normal, ids, values / values.sum(-1, keepdim=True))
    check(normal, ids, logits.topk(top_k).values.softmax(-1))
    scaled = route_experts(
        logits, top_k=top_k, scoring="softmax", renormalize=True, **{**PLAIN, "scale": 2.5}
    )
    check(scaled, ids, 2.5 * values / values.sum(-1, keepdim=True))


@each("route_experts")
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (8, 3), (8, 8), (2, 1)])
@pytest.mark.parametrize(("group_best", "renormalize"), [(2, False), (2, True), (1, False)])
def test_sigmoid_with_bias_and_groups(
    route_experts, num_groups, top_groups, group_best, renormalize
):
    """As DeepSeek-V3 routes, written with a loop; and with the best of each group, as V2."""
    torch.manual_seed(1)
    logits, bias = torch.randn(30, 32), 0.3 * torch.randn(32)
    ids, weights = route_experts(
        logits, bias, 4, "sigmoid", renormalize, 1.7, num_groups, top_groups, group_best
    )
    size = 32 // num_groups
    for token in range(30):
        scores = logits[token].sigmoid()
        choice = (scores + bias).tolist()
        groups = [sorted(choice[g * size :][:size])[-group_best:] for g in range(num_groups)]
        kept = sorted(range(num_groups), key=lambda g: -sum(groups[g]))[:top_groups]
        expected = sorted((e for e in range(32) if e // size in kept), key=lambda e: -choice[e])[:4]
        assert ids[token].tolist() == expected
        chosen = scores[expected]
        total = chosen.sum() if renormalize else 1.0
        torch.testing.assert_close(weights[token], 1.7 * chosen / total, rtol=1e-6, atol=1e-7)


@each("route_experts")
def test_what_is_added_to_the_sum_counts_where_scores_are_small(route_experts):
    """As LFM2-MoE divides."""
    torch.manual_seed(2)
    logits = torch.randn(9, 8) - 14
    options: dict[str, Any] = {"top_k": 3, "scoring": "sigmoid", "renormalize": True, **PLAIN}
    values, ids = logits.sigmoid().topk(3)
    total = values.sum(-1, keepdim=True)
    check(route_experts(logits, **options), ids, values / total)
    check(route_experts(logits, **options, added=1e-6), ids, values / (total + 1e-6))


@each("route_experts")
def test_ties_take_the_lowest_id_and_nan_stays_in_its_row(route_experts):
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0], [torch.nan] * 4, [0.0, torch.nan, 1.0, 5.0]])
    for scoring in ("softmax", "sigmoid"):
        ids, weights = route_experts(logits, top_k=3, scoring=scoring, renormalize=True, **PLAIN)
        assert ids[0].tolist() == [1, 2, 0]
        for row in ids.tolist():
            assert len({*row}) == 3 and all(0 <= expert < 4 for expert in row)
        assert weights[0].isfinite().all() and weights[1].isnan().all()


@each("scale_by_expert")
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 4, 2), (1, 4, 1), (700, 128, 8)])
def test_weights_of_experts_are_scaled(scale_by_expert, tokens, experts, top_k):
    ids, scales = random_ids(tokens, experts, top_k), torch.randn(experts)
    before = torch.rand(ids.shape)
    scale_by_expert(weights := before.clone(), ids, scales)
    assert torch.equal(weights, before * scales[ids.long()])


@each("count_experts")
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (37, 128, 8), (5, 3, 3)])
def test_counts_of_experts(count_experts, tokens, experts, top_k):
    torch.manual_seed(tokens)
    ids, counts = random_ids(tokens, experts, top_k), torch.arange(experts)
    expected = counts + torch.bincount(ids.flatten(), minlength=experts)
    count_experts(ids, None, counts)
    assert torch.equal(counts, expected)
    slots = torch.arange(tokens) % 3 - 1
    count_experts(ids, slots, counts)
    expected += torch.bincount(ids[slots >= 0].flatten(), minlength=experts)
    assert torch.equal(counts, expected)


@each("route_experts")
def test_a_token_is_routed_alike_in_every_batch(route_experts):
    torch.manual_seed(2)
    logits = torch.randn(40, 128)
    options = {"top_k": 8, "scoring": "softmax", "renormalize": True, **PLAIN}
    ids, weights = route_experts(logits, **options)
    for start, end in ((0, 1), (7, 8), (3, 29)):
        some_ids, some_weights = route_experts(logits[start:end].clone(), **options)
        assert torch.equal(some_ids, ids[start:end])
        assert torch.equal(some_weights, weights[start:end])


def one_by_one(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """fused_moe with a call of each packed layer for each token and slot."""
    gate = registry.select("cpu", x.dtype).silu_and_mul
    total = torch.zeros(x.shape)
    for token, chosen in enumerate(ids.tolist()):
        for slot, expert in enumerate(chosen):
            inner = gate(experts.gate_up[expert](x[token : token + 1]))
            returned = experts.down[expert].logits(inner)[0]
            total[token] = fused(returned, weights[token, slot], total[token])
    return total.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [None, 8, 4])
def test_native_experts_give_the_bits_of_each_layer_alone(dtype, bits):
    ops_of = registry.select("cpu", dtype)
    if ops_of.chosen["fused_moe"] != "native":
        pytest.skip("the native library is not built")
    torch.manual_seed(3)
    gate_up, down = torch.randn(6, 96, 128).to(dtype) / 11, torch.randn(6, 128, 48).to(dtype) / 7
    experts = experts_of(gate_up, down, "silu", bits)
    for tokens, top_k in ((1, 3), (2, 6), (50, 2), (300, 4)):
        x, ids = torch.randn(tokens, 128).to(dtype), random_ids(tokens, 6, top_k)
        weights = torch.rand(ids.shape)
        expected = one_by_one(x, ids, weights, experts)
        assert torch.equal(ops_of.fused_moe(x, ids, weights, experts), expected)
        alone = ops_of.fused_moe(x[:1], ids[:1], weights[:1], experts)
        assert torch.equal(alone, expected[:1])
    assert experts.scratch["native"] is not None  # no layer was called by the reference


@pytest.mark.parametrize("implementation", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [None, 8])
def test_the_parts_of_fused_moe_have_its_bits(implementation, dtype, bits):
    """Also where each expert is called apart from the others, as in several engines."""
    parts = ("fused_moe", "expert_outputs", "weighted_sum")
    ops_of = registry.select("cpu", dtype, dict.fromkeys(parts, implementation))
    torch.manual_seed(4)
    gate_up, down = torch.randn(6, 96, 128).to(dtype) / 11, torch.randn(6, 128, 48).to(dtype) / 7
    experts = experts_of(gate_up, down, "silu", bits)
    x, ids, weights = torch.randn(37, 128).to(dtype), random_ids(37, 6, 4), torch.rand(37, 4)
    returned = ops_of.expert_outputs(x, ids, experts)
    assert returned.dtype == torch.float32
    expected = ops_of.fused_moe(x, ids, weights, experts)
    assert torch.equal(ops_of.weighted_sum(returned, weights, dtype), expected)
    for begin, end in ((0, 2), (2, 6)):
        part = Experts(experts.gate_up[begin:end], experts.down[begin:end], "silu")
        rows, slots = ((ids >= begin) & (ids < end)).nonzero(as_tuple=True)
        own = ops_of.expert_outputs(x[rows], ids[rows, slots, None] - begin, part)
        assert torch.equal(own[:, 0], returned[rows, slots])
    nothing = ops_of.expert_outputs(x[:0], ids[:0], experts)
    assert nothing.shape == (0, 4, 128)
    assert ops_of.weighted_sum(nothing, weights[:0], dtype).shape == (0, 128)


@pytest.mark.parametrize("type", ["Q8_0", "Q4_0", "Q5_1", "MXFP4", "Q4_K", "Q6_K", "INT4_128"])
def test_native_experts_of_blocks_give_the_bits_of_each_layer_alone(type):
    ops_of = registry.select("cpu", torch.bfloat16)
    if ops_of.chosen["fused_moe"] != "native":
        pytest.skip("the native library is not built")
    torch.manual_seed(4)

    def pack(rows: int, columns: int) -> list:
        return [
            ops_of.pack_gguf_linear([blocks], [type], None, torch.bfloat16)
            for blocks in (random_blocks(rows, columns, type) for _ in range(5))
        ]

    experts = Experts(pack(512, 256), pack(256, 256), "silu")
    for tokens, top_k in ((1, 2), (4, 5), (60, 2)):
        x, ids = torch.randn(tokens, 256).bfloat16(), random_ids(tokens, 5, top_k)
        weights = torch.rand(ids.shape)
        expected = one_by_one(x, ids, weights, experts)
        assert torch.equal(ops_of.fused_moe(x, ids, weights, experts), expected)
    assert experts.scratch["native"] is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [None, 8, 4, "MXFP4"])
def test_clamped_experts_with_biases_do_not_depend_on_other_tokens(dtype, kind):
    ops_of = registry.select("cpu", dtype)
    if ops_of.chosen["fused_moe"] != "native":
        pytest.skip("the native library is not built")
    torch.manual_seed(5)
    gate_up, down = torch.randn(6, 128, 128).to(dtype) / 11, torch.randn(6, 128, 64).to(dtype) / 8
    biases = torch.randn(6, 128).to(dtype), torch.randn(6, 128).to(dtype)
    if kind == "MXFP4":

        def pack(weight: Tensor, bias: Tensor) -> Any:
            return ops_of.pack_gguf_linear(
                [random_blocks(*weight.shape, kind)], [kind], bias, dtype
            )

        experts = Experts(*packed(pack, gate_up, down, biases), CLAMPED)
    else:
        experts = experts_of(gate_up, down, CLAMPED, kind, biases)
    x, ids = 3 * torch.randn(90, 128).to(dtype), random_ids(90, 6, 4)
    weights = torch.rand(ids.shape)
    result = ops_of.fused_moe(x, ids, weights, experts)
    expected = reference.fused_moe(x, ids, weights, experts)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    for start, end in ((0, 1), (88, 90), (10, 47)):
        part = slice(start, end)
        alone = ops_of.fused_moe(x[part], ids[part], weights[part], experts)
        assert torch.equal(alone, result[part])
    assert experts.scratch["native"] is not None
    x[3] = torch.nan
    spoilt = ops_of.fused_moe(x, ids, weights, experts)
    assert spoilt[3].isnan().all() and torch.equal(spoilt[4:], result[4:])


def test_add_gated_rounds_once():
    x, out = torch.full((1, 4), 3.0), torch.full((1, 4), 1.0)
    ops.add_gated(x.bfloat16(), torch.tensor([[0.0]]), mine := out.bfloat16())
    assert mine.tolist() == [[2.5] * 4]
