"""Runs a decode of few rows in fewer launches: a pass is noted operation by operation, neighbours
become one product, and then all are launched.

Must not know: architectures, requests, how an operation is computed, which products are worth it.

    norm ▸ linear ▸ silu_and_mul          one product with a norm before it and a gate after it
    linear ▸ fused_add_rms_norm           a product that adds to the stream, and a norm
    linear ▸ add                          a product that adds to the stream

The norm of the second line is then a part of the products that read it. A product takes what stands
around it where its packed weight says so (`fuses`; see kernels/triton/linear.py). Neither the
model's code nor its layers know of this: while a pass is noted, the layers call instruments as they
do while a trace runs (executor/tracing/instruments.py), on tensors without memory.
"""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...kernels import registry
from ...kernels.cpu.native.recorder import Guard, Unrecordable
from ...kernels.ops import AttentionMetadata
from ...kernels.registry import OpTable
from ..model import Model
from ..models.layers import Linear
from ..result_checks import RESULTS
from ..tracing.instruments import Instruments, Site, walk
from .step_program import OpByOp

logger = logging.getLogger(__name__)

FEW_ROWS = 2  # the most that any product takes with its neighbours
GATES = {"silu_and_mul": "silu", "gelu_and_mul": "gelu", "gelu_tanh_and_mul": "gelu_tanh"}
LINEAR = "linear"  # the name that instruments give to the product with a packed weight


class Placeholder(Tensor):
    """A tensor without memory. A kernel that is launched with one fails."""

    def data_ptr(self) -> int:
        raise Unrecordable("an operation is called in a way that instruments do not see")


class _Guard(Guard):
    """Allows views, and placeholders to be made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format and kwargs["device"].type == "meta":
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


@dataclass(frozen=True, eq=False)
class Call:
    """One launch. Where it makes tensors, `results` are their placeholders."""

    op: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    results: tuple[Tensor, ...] = ()

    def touches(self, tensor: Tensor) -> bool:
        return any(key_of(one) == key_of(tensor) for one in self.tensors())

    def tensors(self) -> list[Tensor]:
        """Those that it reads, makes or changes."""
        return [*_tensors((self.args, list(self.kwargs.values()))), *self.results]


def key_of(tensor: Tensor) -> int:
    """Names the memory of which a tensor is a view."""
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class FusedPass:
    """A Forward for CUDA graphs: as OpByOp, of few rows in fewer launches."""

    def __init__(self, model: Model, ops: OpTable):
        self._model, self._ops, self._op_by_op = model, ops, OpByOp(model, ops)
        layers = (layer for layer, _ in walk(model) if isinstance(layer, Linear))
        self._is_fused = any(hasattr(layer.packed, "fuses") for layer in layers)

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor,
        token_types: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """See Forward."""
        inputs = token_ids, positions, metadata, logits_indices, token_types
        if self._is_fused and len(token_ids) <= FEW_ROWS:
            try:
                calls, results = noted(self._model, self._ops, *inputs)
            except Unrecordable as error:
                self._is_fused = False
                logger.info("a decode runs operation by operation: %s", error)
            else:
                return launch(fuse(calls, results, self._ops), results)
        return self._op_by_op(*inputs)


def noted(model: Model, ops: OpTable, *inputs: Any) -> tuple[list[Call], tuple[Tensor, ...]]:
    """Returns the calls of a pass of `model`, none of which is made, and its results.

    inputs: of Forward. Raises Unrecordable for a pass that computes with anything but operations
    whose results are known from their arguments.
    """
    calls: list[Call] = []

    def note(site: Site, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        results = tuple(_empty(*one) for one in _results(site, function, args, kwargs))
        calls.append(Call(site.op, function, args, kwargs, results))
        if not results:
            return None
        return results[0] if len(results) == 1 else results

    put = Instruments(ops, note, _is_no_operation, _is_no_operation)
    try:
        put.attach(model)
        with _Guard():
            results = OpByOp(model, put.table(""))(*inputs)  # type: ignore[arg-type]
    finally:
        put.detach()
    return calls, results


def _is_no_operation(site: Site) -> None:
    raise Unrecordable(f"{site.module} is a module of PyTorch")


def _empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").as_subclass(Placeholder)


def _results(
    site: Site, function: Callable, args: tuple, kwargs: dict[str, Any]
) -> list[tuple[Sequence[int], torch.dtype]]:
    """Shapes and dtypes of what a call makes."""
    if site.op == LINEAR:
        name = getattr(function, "__name__", "")
        if function is site.function and name in ("", "logits"):
            dtype = torch.float32 if name else args[0].dtype
            return [((len(args[0]), site.sizes[1]), dtype)]
    elif site.op == "argmax":
        return [((len(args[0]),), torch.int64), ((len(args[0]),), torch.bool)]
    elif site.op in registry.CONTRACTS:
        if inspect.signature(registry.CONTRACTS[site.op]).return_annotation in (None, "None"):
            return []
        if site.op in RESULTS:
            return [RESULTS[site.op](*args, **kwargs)]
    raise Unrecordable(f"the results of {site.op} are not known from its arguments")


def fuse(calls: list[Call], results: Sequence[Tensor], ops: OpTable) -> list[Call]:
    """Returns the calls with products that take their neighbours. results: what is read after
    all calls.
    """
    calls = [_as_product(call) for call in calls]
    uses = _uses(calls, results)
    fused: list[Call | None] = list(calls)
    for index, call in enumerate(calls):
        if call.op == PRODUCT:
            _fuse_with_next(fused, index, uses[key_of(call.results[0])], ops)
    calls = [call for call in fused if call is not None]
    uses = _uses(calls, results)
    fused = list(calls)
    for index, call in enumerate(calls):
        if call.op == "rms_norm":
            _fuse_with_readers(fused, index, uses[key_of(call.results[0])])
    return [call for call in fused if call is not None]


PRODUCT = "product"  # of a packed weight that takes its neighbours


def _as_product(call: Call) -> Call:
    fuses = getattr(call.function, "fuses", None)
    if call.op != LINEAR or fuses is None or not fuses(len(call.args[0])):
        return call
    return replace(call, op=PRODUCT, kwargs={"norm": None, "gate": "", "residual": None})


def _uses(calls: Sequence[Call], results: Sequence[Tensor]) -> dict[int, list[int]]:
    """Memory maps to the indices of the calls that touch it, in order."""
    uses: dict[int, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        for key in {key_of(tensor) for tensor in call.tensors()}:
            uses[key].append(index)
    for tensor in results:
        uses[key_of(tensor)].append(len(calls))
    return uses


def _is_whole(x: Any, y: Tensor) -> bool:
    return isinstance(x, Tensor) and key_of(x) == key_of(y) and x.shape == y.shape


def _fuse_with_next(calls: list[Call | None], index: int, uses: list[int], ops: OpTable) -> None:
    """The product at `index` takes the call after it. uses: of its result."""
    product, following = calls[index], calls[index + 1] if index + 1 < len(calls) else None
    assert product is not None
    (y,), x = product.results, product.args[0]
    if following is None or not following.args or not _is_whole(following.args[0], y):
        return
    is_alone = uses == [index, index + 1]  # nothing else reads the result
    if following.op in GATES and is_alone:
        kwargs = product.kwargs | {"gate": GATES[following.op]}
        calls[index : index + 2] = replace(product, kwargs=kwargs, results=following.results), None
    elif following.op in ("add", "fused_add_rms_norm"):
        residual = following.args[1]
        if residual.shape != y.shape or key_of(residual) in (key_of(x), key_of(y)):
            return
        added = replace(product, kwargs=product.kwargs | {"residual": residual}, results=())
        if following.op == "add" and is_alone:
            calls[index : index + 2] = added, None
        elif following.op == "fused_add_rms_norm":
            norm = Call("rms_norm", ops.rms_norm, (residual, *following.args[2:]), {}, (y,))
            calls[index : index + 2] = added, norm


def _fuse_with_readers(calls: list[Call | None], index: int, uses: list[int]) -> None:
    """The products that read the result of the norm at `index` compute it, if nothing else reads
    it. uses: of its result.
    """
    norm = calls[index]
    assert norm is not None
    (y,), (x, weight, eps) = norm.results, norm.args
    readers = uses[1:]
    if x.dim() != 2 or not readers or readers[-1] >= len(calls):
        return
    for other in range(index + 1, readers[-1] + 1):
        call = calls[other]
        if call is None:
            continue
        if other not in readers:
            if call.touches(x):
                return
        elif not (call.op == PRODUCT and _takes_norm(call, y, x)):
            return
    for reader in readers:
        call = calls[reader]
        assert call is not None
        calls[reader] = replace(call, args=(x,), kwargs=call.kwargs | {"norm": (weight, eps)})
    calls[index] = None


def _takes_norm(product: Call, y: Tensor, x: Tensor) -> bool:
    residual = product.kwargs["residual"]
    return _is_whole(product.args[0], y) and not (
        residual is not None and key_of(residual) in (key_of(x), key_of(y))
    )


def launch(calls: Sequence[Call], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Makes the calls, and returns what `results` stand for. Memory is released after its last
    use.
    """
    last = {key: indices[-1] for key, indices in _uses(calls, results).items()}
    made: dict[int, Tensor] = {}  # what placeholders stand for

    def real(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(real(item) for item in value)
        if not isinstance(value, Tensor) or key_of(value) not in made:
            return value
        whole = made[key_of(value)]
        offset = whole.storage_offset() + value.storage_offset()
        return whole.as_strided(value.shape, value.stride(), offset)

    for index, call in enumerate(calls):
        function: Any = call.function
        function = function.fused if call.op == PRODUCT else function
        result = function(*real(call.args), **{k: real(v) for k, v in call.kwargs.items()})
        found = result if isinstance(result, tuple) else (result,)
        for placeholder, tensor in zip(call.results, found):
            is_known = tensor.shape == placeholder.shape and tensor.dtype == placeholder.dtype
            assert is_known and tensor.is_contiguous(), call.op
            made[key_of(placeholder)] = tensor
        for key in [key for key in made if last[key] <= index]:
            del made[key]
    return tuple(real(tensor) for tensor in results)
