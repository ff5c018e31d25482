"""The public functions: contracts are documented, dispatch goes by device and dtype, and only the
named arguments are written.
"""

import dataclasses
import inspect

import pytest
import torch
from quire.kernels import ops, registry
from quire.tests.kernels import cases
from quire.tests.kernels.attention_cases import make_metadata
from quire.tests.kernels.case import copies

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("op", registry.CONTRACTS)
def test_every_contract_is_public_and_says_shapes(op):
    function = getattr(ops, op)
    assert inspect.signature(function) == inspect.signature(registry.CONTRACTS[op])
    assert "[" in function.__doc__ and all(
        p.annotation is not p.empty for p in inspect.signature(function).parameters.values()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", cases.MODEL_OPS)
def test_dispatches_and_writes_only_what_it_says(op, dtype):
    torch.manual_seed(0)
    for case in cases.MODEL_OPS[op](dtype):
        args = copies(case.args)
        case.call(getattr(ops, op), args)
        for i, (before, after) in enumerate(zip(case.args, args)):
            if isinstance(before, torch.Tensor) and i not in case.in_place:
                assert torch.equal(before.nan_to_num(), after.nan_to_num()), (
                    f"{case.name}: argument {i} was written"
                )


def test_rotary_leaves_the_rest_of_the_projection_alone():
    qkv = torch.randn(5, 8, 16)
    before = qkv.clone()
    query, key, value = qkv.split((4, 2, 2), dim=1)
    cache = torch.cat(
        (
            torch.arange(10.0)[:, None].cos().expand(10, 8),
            torch.arange(10.0)[:, None].sin().expand(10, 8),
        ),
        -1,
    )
    ops.rotary_embedding(torch.tensor([0, 3, 1, 9, 0]), query, key, cache)
    assert torch.equal(value, before[:, 6:])
    # position 0: no rotation
    assert torch.equal(qkv[0], before[0]) and torch.equal(qkv[4], before[4])
    assert not torch.equal(qkv[1, :6], before[1, :6])


def test_functions_take_keywords():
    x, weight = torch.randn(2, 8), torch.randn(8)
    assert torch.equal(ops.rms_norm(x=x, weight=weight, eps=1e-6), ops.rms_norm(x, weight, 1e-6))


def test_empty_batches():
    reals, integers = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    for op, args in (
        ("argmax", [torch.zeros(0, 9)]),
        ("sample_tokens", [torch.zeros(0, 9), reals, integers, reals, reals, integers, integers]),
        ("random_gumbel", [integers, integers, 9]),
        ("gather_logprobs", [torch.zeros(0, 9), integers, 3]),
    ):
        result = getattr(ops, op)(*args)
        assert all(
            len(tensor) == 0 for tensor in (result if isinstance(result, tuple) else (result,))
        ), op


def test_metadata_is_frozen_and_keeps_its_scratch_to_itself():
    first, second = (make_metadata([1, 4], [9, 4], 8, 8) for _ in range(2))
    first.scratch["x"] = 1
    assert not second.scratch
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.num_decodes = 3
