"""Routing in Triton gives the reference's experts and weights, and counting its counts."""

import pytest
import torch
from quire.kernels import registry
from quire.tests.kernels.case import on_gpu


@pytest.mark.sampled
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("experts", "groups", "top_groups"), [(5, 1, 1), (24, 4, 2), (32, 2, 2)])
def test_routes_as_the_reference(scoring, renormalize, has_bias, experts, groups, top_groups):
    torch.manual_seed(0)
    registry.import_implementations("cuda")
    found = {i.name: i.function for i in registry.implementations("route_experts")}
    logits = 2 * torch.randn(6, experts)
    logits[0] = 1.0  # ties
    bias = torch.randn(experts) / 4 if has_bias else None
    options = (3, scoring, renormalize, 1.5, groups, top_groups)
    ids, weights = on_gpu(found["triton"])(logits, bias, *options)
    expected_ids, expected = found["reference"](logits, bias, *options)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)


def test_a_row_of_nan_has_valid_experts_and_affects_no_other():
    registry.import_implementations("cuda")
    route = next(
        i.function for i in registry.implementations("route_experts") if i.name == "triton"
    )
    logits = torch.randn(3, 8)
    options = (None, 4, "softmax", True, 1.0, 1, 1)
    ids, weights = on_gpu(route)(logits, *options)
    logits[1] = torch.nan
    spoilt_ids, spoilt = on_gpu(route)(logits, *options)
    assert torch.equal(spoilt_ids[[0, 2]], ids[[0, 2]])
    assert torch.equal(spoilt[[0, 2]], weights[[0, 2]]) and spoilt[1].isnan().all()
    assert len({*spoilt_ids[1].tolist()}) == 4 and all(0 <= i < 8 for i in spoilt_ids[1].tolist())


@pytest.mark.parametrize("has_slots", [False, True])
def test_counts_as_the_reference(has_slots):
    registry.import_implementations("cuda")
    found = {i.name: i.function for i in registry.implementations("count_experts")}
    ids = torch.randint(0, 7, (50, 3), dtype=torch.int32)
    slots = torch.arange(50) % 4 - 1 if has_slots else None
    counts = torch.arange(7)
    expected = counts.clone()
    on_gpu(found["triton"])(ids, slots, counts)
    found["reference"](ids, slots, expected)
    assert torch.equal(counts, expected)
