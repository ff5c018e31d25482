"""Sizes of operations from their arguments, and the lines that called them."""

import sys

import torch
from quire.executor.tracing.instruments import Site
from quire.executor.tracing.operations import (
    Argument,
    calling_place,
    dtype_of,
    implementation_place,
    kept,
    work_of,
)
from quire.kernels.reference import norm
from quire.tests.kernels.attention_cases import make_metadata


def site(op: str, **fields) -> Site:
    return Site("layers.0", op, "cpu", None, **fields)


def test_no_data_is_kept():
    x = torch.ones(3, 4)
    [first, number] = kept([x, 0.5])
    assert isinstance(first, Argument) and (first.shape, first.dtype) == ((3, 4), "float32")
    assert first.num_bytes == x.nbytes and number == 0.5
    assert not any(value is x for value in (getattr(first, name) for name in Argument.__slots__))
    assert dtype_of(kept([torch.ones(2, dtype=torch.int64), x.bfloat16()])) == "bfloat16"


def test_a_linear_layer():
    found, weight_bytes = work_of(
        site("linear", weight_bytes=640, sizes=(4, 40)), kept([torch.ones(3, 4)]), {}
    )
    assert found.shape == "[3, 4] · [40, 4]ᵀ" and weight_bytes == 640
    assert found.flops == 2 * 3 * 4 * 40


def test_a_norm_reads_its_weight():
    x, weight = torch.ones(3, 4), torch.ones(4)
    found, weight_bytes = work_of(
        site("rms_norm"), kept([x, weight, 1e-5]), {weight.data_ptr(): weight.nbytes}
    )
    assert weight_bytes == weight.nbytes and found.num_bytes == 2 * x.nbytes


def test_attention_takes_the_lengths_of_its_requests():
    metadata = make_metadata([1, 3], [9, 3], block_size=4, num_blocks=8)
    query, cache = torch.ones(4, 4, 8), torch.ones(16, 4, 2, 8)
    found, _ = work_of(site("paged_attention"), kept([query, cache, cache, metadata, 0.3, 0]), {})
    assert found.flops == 4 * (9 + 6) * 4 * 8


def test_a_state_is_read_and_written_by_each_request():
    metadata = make_metadata([1, 3], [9, 3], block_size=4, num_blocks=8)
    key, value, scalars = torch.ones(4, 2, 8), torch.ones(4, 4, 6), torch.ones(4, 4)
    weight, state = torch.ones(4), torch.ones(5, 4, 8, 6)
    arguments = key, key, value, scalars, scalars, weight, weight, state, metadata, False
    weights = {weight.data_ptr(): weight.nbytes}
    found, _ = work_of(site("gated_delta_rule"), kept(arguments), weights)
    assert found.shape == "[4] · state [4, 8, 6]" and found.flops == 4 * 4 * 8 * 6 * 7
    of_a_token = 2 * 2 * 8 + 2 * 4 * 6 + 2 * 4
    assert found.num_bytes == 4 * (2 * 2 * 4 * 8 * 6 + 4 * of_a_token)


def test_places():
    assert calling_place(sys._getframe()) == ""
    assert implementation_place(norm.rms_norm).startswith("kernels/reference/norm.py:")
