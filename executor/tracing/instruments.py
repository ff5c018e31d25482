"""Puts wrappers around the operations that a model calls, while a trace runs.

Must not know: what is measured, architectures, requests.

A layer holds the functions that it calls: operations of the table, and the product with its packed
weight. Each of these attributes is replaced by one that passes its call on through `around`, with
the layer's path in the model, and is put back at the end. So a model that is not traced runs
exactly the code that it was made of.

A plugin's layer may hold functions of its own, such as what its operation for packing returned.
They are replaced too.

A module of PyTorch (a model in transformers' code) also gets hooks around its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.registry import OpTable
from ..models.layers import Embedding, Linear

# (operation as it was called, function, arguments) -> the function's result
Around = Callable[..., Any]
MULTIPLY = {
    "logits",
    "silu_and_mul",
    "gelu_tanh_and_mul",
    "embedding",
}  # methods of a packed weight
NOT_WEIGHTS = {"key_cache", "value_cache", "counts", "slots"}
_ABSENT = object()


class Site(NamedTuple):
    """The place that calls an operation, and what the operation uses besides its arguments."""

    module: str  # path in the model
    op: str
    implementation: str
    function: Any
    weight_bytes: int = 0  # of what the function itself holds
    sizes: tuple[int, int] = (0, 0)  # of a weight: (columns in, columns out)


class Instruments:
    """Wrappers around everything that `attach` finds, until `detach`.

    around(site, function, arguments, keywords) calls the function and returns its result.
    enter(site) and leave(site) are called around the forward pass of a module of PyTorch.
    """

    def __init__(
        self,
        ops: OpTable,
        around: Around,
        enter: Callable[[Site], None],
        leave: Callable[[Site], None],
    ):
        self.ops = ops
        self._around, self._enter, self._leave = around, enter, leave
        self._names = {id(getattr(ops, op)): op for op in ops.chosen}
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        self._hooks: list[Any] = []
        self._hooked: set[int] = set()
        self.weights: dict[int, int] = {}  # address -> bytes of what layers read whole

    def attach(self, owner: Any, path: str = "") -> None:
        """Replaces the operations that `owner` and all that it holds call."""
        for layer, name in walk(owner, path):
            self._attach(layer, name)

    def detach(self) -> None:
        for attributes, name, value in reversed(self._replaced):
            if value is _ABSENT:
                del attributes[name]
            else:
                attributes[name] = value
        for hook in self._hooks:
            hook.remove()
        self._replaced, self._hooks, self._hooked = [], [], set()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replaces one attribute until `detach`."""
        attributes = vars(owner)
        self._replaced.append((attributes, name, attributes.get(name, _ABSENT)))
        attributes[name] = value

    def table(self, path: str) -> Any:
        """The table of operations for calls from `path`."""
        return _Table(self, path)

    def wrap(self, site: Site) -> Callable[..., Any]:
        return partial(_call, self._around, site)

    def site(self, path: str, op: str) -> Site:
        return Site(path, op, self.ops.chosen[op], getattr(self.ops, op))

    def _attach(self, layer: Any, path: str) -> None:
        is_embedding = isinstance(layer, (Embedding, nn.Embedding))
        is_foreign = not isinstance(layer, nn.Module) and not _is_of_quire(type(layer))
        for name, value in list(vars(layer).items()):
            if value is self.ops:
                self.replace(layer, name, self.table(path))
            elif id(value) in self._names:
                self.replace(layer, name, self.wrap(self.site(path, self._names[id(value)])))
            elif isinstance(layer, Linear) and name == "_multiply":
                self.replace(layer, name, _Multiply(self, path, layer, value))
            elif isinstance(layer, Embedding) and name == "_look_up" and value is not None:
                implementation = self.ops.chosen[_packer(getattr(value, "__self__", None))]
                self.replace(layer, name, self.wrap(Site(path, "embedding", implementation, value)))
            elif is_foreign and _is_function(value):
                self.replace(layer, name, _Function(self, self._own_site(path, name, value)))
            elif (
                isinstance(value, Tensor)
                and not (is_embedding or value.is_meta)  # a pass without tensors may leave some
                and name not in NOT_WEIGHTS
            ):
                self.weights[address_of(value)] = value.nbytes
        if isinstance(layer, nn.Module):
            self._hook(layer, path, is_embedding)

    def _own_site(self, path: str, name: str, value: Any) -> Site:
        """The site of a function that a plugin's layer holds as its attribute `name`. If it was
        defined within the implementation of an operation, it has that operation's name.
        """
        inner = value.func if isinstance(value, partial) else value
        kind = inner if hasattr(inner, "__qualname__") else type(inner)
        tensors = list(tensors_of(value))
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if _is_of_quire(kind):
            sizes = _sizes(value, tensors, getattr(value, "out_features", 0))
            implementation = self.ops.chosen[_packer(value)]
            return Site(path, "linear", implementation, value, num_bytes, sizes)
        for op, implementation in self.ops.chosen.items():
            maker = getattr(self.ops, op)
            within = f"{maker.__qualname__}.<locals>."
            if kind.__module__ == maker.__module__ and kind.__qualname__.startswith(within):
                return Site(path, op.removeprefix("pack_"), implementation, value, num_bytes)
        return Site(path, name, kind.__module__, value, num_bytes)

    def _hook(self, module: nn.Module, path: str, is_embedding: bool) -> None:
        if type(module).__call__ is not nn.Module.__call__:
            return  # it runs no hooks: a layer of Quire in a module's place
        if id(module._forward_hooks) in self._hooked:  # a copy of another module shares its hooks
            return
        self._hooked.add(id(module._forward_hooks))
        own = [] if is_embedding else list(module.parameters(recurse=False))
        num_bytes = sum(tensor.nbytes for tensor in own)
        for tensor in own:
            self.weights[address_of(tensor)] = tensor.nbytes
        site = Site(path, type(module).__name__, "transformers", type(module).forward, num_bytes)
        self._hooks += [
            module.register_forward_pre_hook(lambda *_: self._enter(site)),
            module.register_forward_hook(lambda *_: self._leave(site), always_call=True),
        ]


def _call(around: Around, site: Site, *args: Any, **kwargs: Any) -> Any:
    return around(site, site.function, args, kwargs)


class _Table:
    """The table of operations, as one place in a model sees it."""

    def __init__(self, instruments: Instruments, path: str):
        self.chosen = instruments.ops.chosen
        self._instruments, self._path = instruments, path

    def __getattr__(self, op: str) -> Callable[..., Any]:
        wrapped = self._instruments.wrap(self._instruments.site(self._path, op))
        vars(self)[op] = wrapped
        return wrapped


class _Function:
    """A function that a plugin's layer holds."""

    def __init__(self, instruments: Instruments, site: Site):
        self._instruments, self._site = instruments, site

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _call(self._instruments._around, self._site, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._site.function, name)


class _Multiply:
    """The product with a packed weight."""

    def __init__(self, instruments: Instruments, path: str, layer: Linear, packed: Any):
        self._packed, self._instruments = packed, instruments
        tensors = list(tensors_of(packed))
        instruments.weights.update({address_of(tensor): tensor.nbytes for tensor in tensors})
        sizes = _sizes(packed, tensors, sum(layer.shards.values()))
        self._site = Site(
            path,
            "linear",
            instruments.ops.chosen[_packer(packed)],
            packed,
            sum(tensor.nbytes for tensor in tensors),
            sizes,
        )

    def __call__(self, x: Tensor) -> Tensor:
        return _call(self._instruments._around, self._site, x)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._packed, name)
        if name not in MULTIPLY:
            return value
        return self._instruments.wrap(self._site._replace(function=value))


def address_of(tensor: Tensor) -> int:
    """The address of its first number. A tensor in a layout of a library's own gets another unique
    number.
    """
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return id(tensor)


def _sizes(packed: Any, tensors: list[Tensor], rows: int) -> tuple[int, int]:
    """The sizes of a packed weight: (columns in, columns out), 0 where they cannot be found."""
    columns = (t.shape[1] for t in tensors if t.shape[:1] == (rows,) and t.dim() > 1)
    return getattr(packed, "in_features", 0) or max(columns, default=0), rows


def _is_of_quire(kind: Any) -> bool:
    return kind.__module__.startswith("quire.") and not kind.__module__.startswith("quire.tests.")


def _is_function(value: Any) -> bool:
    is_other = isinstance(value, (type, nn.Module, OpTable)) or _is_layer(value)
    return callable(value) and not is_other


def _packer(packed: Any) -> str:
    """The operation that made a packed weight."""
    if hasattr(packed, "bits"):
        return "pack_quantized_linear"
    return "pack_gguf_linear" if hasattr(packed, "parts") else "pack_linear"


def tensors_of(packed: Any, depth: int = 3) -> Iterator[Tensor]:
    """The tensors that a function or an object holds."""
    cells = [cell.cell_contents for cell in getattr(packed, "__closure__", None) or ()]
    defaults = list(getattr(packed, "__defaults__", None) or ())
    bound = [*getattr(packed, "args", ()), *getattr(packed, "keywords", {}).values()]
    for value in [*getattr(packed, "__dict__", {}).values(), *cells, *defaults, *bound]:
        if isinstance(value, Tensor):
            yield value
        elif depth and isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    yield item
                elif hasattr(item, "__dict__"):
                    yield from tensors_of(item, depth - 1)
        elif depth and (callable(value) and not isinstance(value, type)):
            yield from tensors_of(value, depth - 1)


def walk(owner: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[Any, str]]:
    """`owner` and the layers that it holds, each once, with their paths."""
    seen = set() if seen is None else seen
    if id(owner) in seen:
        return
    seen.add(id(owner))
    yield owner, path
    for name, value in list(vars(owner).items()):
        for suffix, layer in _layers(name, value):
            yield from walk(layer, _join(path, suffix, layer), seen)


def _layers(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if _is_layer(value):
        yield name, value
    elif isinstance(value, (list, nn.ModuleList)):
        for i, item in enumerate(value):
            if _is_layer(item):
                yield f"{name}.{i}", item


def _is_layer(value: Any) -> bool:
    if isinstance(value, nn.Module):
        return not isinstance(value, nn.ModuleList)
    if isinstance(value, (torch.Tensor, OpTable, type, partial)) or not hasattr(value, "__dict__"):
        return False
    kind = type(value)
    if kind.__module__.split(".")[0] in ("builtins", "torch", "transformers", "ctypes"):
        return False
    return hasattr(kind, "weights") or kind.__module__.startswith("quire.executor.models.")


def _join(path: str, name: str, layer: Any) -> str:
    """A path in the names of the checkpoint, where the layer has one."""
    own = getattr(layer, "name", None)
    is_inner = name in ("linear", "quire", "merged", "quire_attention", "_model", "_base")
    name = own if isinstance(own, str) and own else name.removeprefix("_")
    if is_inner:
        return path
    return f"{path}.{name}" if path else name
