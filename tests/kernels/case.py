"""A call of an operation together with the same computation in torch, and how to run it: on copies
of its arguments, on a GPU, in Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from quire.kernels.moe import Experts
from quire.kernels.ops import AttentionMetadata
from quire.tests.kernels.triton.waiting import NothingWaits
from torch import Tensor

# Triton's interpreter runs the GPU kernels on tensors in host memory; only these are tested then
# (tests/kernels/triton/).
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if INTERPRETED:
    from quire.tests.kernels.triton.guard import reachable
else:
    # entered with the tensors whose addresses a kernel reads from memory
    reachable = contextlib.nullcontext


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

    bias = None

    def __init__(self, weight: Tensor):
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


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
            if isinstance(value, AttentionMetadata):
                return replace(
                    value,
                    **{
                        name: move(item)
                        for name, item in vars(value).items()
                        if isinstance(item, Tensor)
                    },
                )
            if isinstance(value, Experts):
                layers = [
                    [DenseLayer(move(layer.weight)) for layer in of_experts]
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
        with reachable([written for _, written in back]), NothingWaits():
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
