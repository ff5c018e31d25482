"""A call of an operation together with the same computation in torch, and how to run it: on copies
of its arguments, on a GPU, in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from quire.kernels.moe import Experts
from quire.kernels.ops import AttentionMetadata, StateRows
from quire.kernels.reference.gguf_blocks import block_type
from quire.tests.kernels.triton.waiting import NothingWaits
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Triton's interpreter runs the GPU kernels on tensors in host memory; only these are tested then
# (tests/kernels/triton/).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# of tests that show, in minutes in the interpreter, what others show there or on the CPU
slow_if_interpreted = pytest.mark.slow if INTERPRETED else lambda test: test

if INTERPRETED:
    from quire.tests.kernels.triton.guard import reachable
else:
    # entered with the tensors whose addresses a kernel reads from memory
    reachable = contextlib.nullcontext


class ProductsInFloat32(TorchFunctionMode):
    """Gives tensors of the host torch.mm into fp32, which torch has on a GPU only."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.mm and not args[0].is_cuda and (kwargs or {}).pop("out_dtype", None):
            args = tuple(arg.float() for arg in args)
        return func(*args, **(kwargs or {}))


@dataclass
class Case:
    """One call of an operation, and the same computation in torch."""

    name: str
    args: tuple[Any, ...]
    torch_own: Callable[..., tuple[Tensor, ...]]
    # indices of the arguments that the operation writes; these are its results
    in_place: tuple[int, ...] = ()

    def run(self, function: Callable) -> tuple[Tensor, ...]:
        """Calls on copies; returns the results as a tuple."""
        args = copies(self.args)
        result = self.call(function, args)
        if self.in_place:
            assert result is None
            return tuple(args[i] for i in self.in_place)
        return result if isinstance(result, tuple) else (result,)

    def call(self, function: Callable, args: list[Any]) -> Any:
        return function(*args)

    def truth(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self.torch_own(
            *(
                arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg
                for arg in self.args
            )
        )


def copies(args: tuple[Any, ...]) -> list[Any]:
    """Copies of tensors with the same strides, in which views of one tensor stay views of one;
    metadata without its scratch; other arguments unchanged.
    """
    storages: dict[tuple[int, torch.dtype], Tensor] = {}

    def copy(arg: Any) -> Any:
        if isinstance(arg, AttentionMetadata):
            return AttentionMetadata(
                **{
                    name: getattr(arg, name)
                    for name in arg.__dataclass_fields__
                    if name != "scratch"
                }
            )
        if not isinstance(arg, Tensor):
            return arg
        storage = arg.untyped_storage()
        key = storage.data_ptr(), arg.dtype  # empty tensors all have address 0
        if key not in storages:
            storages[key] = arg.as_strided(
                (storage.nbytes() // arg.element_size(),), (1,), 0
            ).clone()
        return storages[key].as_strided(arg.shape, arg.stride(), arg.storage_offset())

    return [copy(arg) for arg in args]


class DenseLayer:
    """A linear layer that a GPU's experts may have."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def on_gpu(function: Callable) -> Callable:
    """Wraps an implementation for GPUs as a function of tensors in host memory: they are copied to
    the GPU, and written ones back. Fails if the implementation reads a tensor's contents, because
    that waits for the GPU.
    """
    names = list(inspect.signature(function).parameters)

    def call(*args: Any) -> Any:
        # by storage, so that views of one stay views of one
        moved: dict[tuple[int, torch.dtype], Tensor] = {}
        back: list[tuple[Tensor, Tensor]] = []

        def move(value: Any) -> Any:
            if isinstance(value, list):
                return [move(item) for item in value]
            if isinstance(value, (AttentionMetadata, StateRows)):
                return replace(
                    value,
                    **{
                        name: move(item)
                        for name, item in vars(value).items()
                        if isinstance(item, (Tensor, StateRows))
                    },
                )
            if isinstance(value, Experts):
                layers = [
                    [DenseLayer(move(layer.weight), move(layer.bias)) for layer in of_experts]
                    for of_experts in (value.gate_up, value.down)
                ]
                return Experts(*layers, value.activation)
            if not isinstance(value, Tensor):
                return value
            storage = value.untyped_storage()
            whole = value.as_strided((storage.nbytes() // value.element_size(),), (1,), 0)
            key = storage.data_ptr(), value.dtype  # empty tensors all have address 0
            if key not in moved:
                moved[key] = whole.to(GPU, copy=True)
                back.append((whole, moved[key]))
            return moved[key].as_strided(value.shape, value.stride(), value.storage_offset())

        # copy_blocks takes them on the host
        there = [arg if name == "pairs" else move(arg) for name, arg in zip(names, args)]
        with reachable([written for _, written in back]), NothingWaits(), ProductsInFloat32():
            result = function(*there)
        for here, written in back:
            here.copy_(written)
        if callable(result):
            return on_gpu(result)
        return (
            tuple(r.cpu() for r in result)
            if isinstance(result, tuple)
            else result.cpu()
            if isinstance(result, Tensor)
            else result
        )

    call.is_on_gpu = True  # type: ignore[attr-defined]
    return call


def rand(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


def random_blocks(rows: int, columns: int, type: str) -> Tensor:
    """Blocks of any bytes, whose scales are such that weights are about 1 / columns**0.5."""
    blocks = torch.randint(
        256, (rows, columns // block_type(type).columns, block_type(type).num_bytes)
    ).byte()
    if type.startswith("INT4"):
        scales = (torch.randn(blocks.shape[:2]) / (8 * columns**0.5)).half().float()
        words = scales.view(torch.int32) | torch.randint(16, scales.shape, dtype=torch.int32)
        blocks[..., :4] = words.unsqueeze(-1).view(torch.uint8)
        return blocks.flatten(1)
    if type.startswith("FP8"):
        numbers = blocks[..., -block_type(type).columns :]
        numbers[numbers & 127 == 127] = 0  # NaN
        scales = torch.randn(blocks.shape[:2]) / (256 * columns**0.5)
        blocks[..., :4] = scales.unsqueeze(-1).view(torch.uint8)
        if type.endswith("_STATIC"):
            blocks[..., 4:8] = (torch.rand(1) / 50).view(torch.uint8)
        return blocks.flatten(1)
    if type == "MXFP4":  # 2 ** (byte - 128), numbers up to 12
        lowest = 128 - round(math.log2(8 * columns**0.5))
        blocks[..., 0] = torch.randint(lowest - 3, lowest + 1, blocks.shape[:2]).byte()
        return blocks.flatten(1)
    types = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K"]
    sizes = dict(zip(types, (128, 8, 16, 16, 32, 128, 1000, 2000, 4000), strict=True))
    largest = sizes.get(type, 2)  # of INT2_*
    halves = 2 if type in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    scales = torch.randn(*blocks.shape[:2], halves) / (largest * columns**0.5)
    if halves == 2:  # minima are as large as the numbers times their scales
        scales[..., 1] *= {"Q4_1": 8, "Q5_1": 16, "Q4_K": 8, "Q5_K": 16}[type]
    at = blocks.shape[2] - 2 if type == "Q6_K" else 0
    blocks[..., at : at + 2 * halves] = scales.half().view(torch.uint8)
    return blocks.flatten(1)
