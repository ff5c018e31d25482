"""Registers implementations of operations, and selects one of each when a model is loaded.

Must not know: what an operation computes (ops.py), models, requests.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from ..ipc.errors import InvalidParameterError

logger = logging.getLogger(__name__)

NATIVE = "native"  # the name of the implementations in kernels/cpu/native

# An operation maps to the function whose signature and docstring are its contract.
CONTRACTS: dict[str, Callable] = {}
_functions: dict[str, Callable] = {}  # operation -> its default choice, see `operation`
# An operation maps to its implementations by name.
_implementations: dict[str, dict[str, Implementation]] = {}
_unimported: dict[str, str] = {}  # device -> module that registers more implementations


@dataclass(frozen=True)
class Facts:
    """What a predicate may depend on.

    A size is 0 where it is unknown, and the predicate of an implementation that needs it must then
    be false.
    """

    device: str  # torch's device type: "cpu", "cuda"
    dtype: torch.dtype  # of activations; of the logits for the sampling operations
    head_dim: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    block_size: int = 0
    cpu_isa: str = "auto"  # instruction set of the native kernels; "none" disables them
    kv_cache_dtype: torch.dtype | None = None  # None: as dtype
    capability: int = 0  # a GPU's compute capability, 90 for 9.0

    @property
    def converts_kv(self) -> bool:
        """Returns whether keys and values are stored in another dtype than they are computed in."""
        return self.kv_cache_dtype not in (None, self.dtype)


@dataclass(frozen=True)
class Implementation:
    op: str
    name: str
    function: Callable
    predicate: Callable[[Facts], bool]
    priority: int
    is_native: bool = False  # can be recorded into a native program


class OpTable:
    """The selected implementations, one attribute per operation.

    `ops.rms_norm(x, weight, eps)` is a plain function call. Each engine has its own table. `chosen`
    maps an operation to its implementation's name; `native` has those that native programs call.
    """

    def __init__(self, implementations: Mapping[str, Implementation]):
        self.chosen = {op: implementation.name for op, implementation in implementations.items()}
        self.native = {
            op for op, one in implementations.items() if one.is_native or one.name == NATIVE
        }
        for op, implementation in implementations.items():
            self.replace(op, implementation.function)

    def replace(self, op: str, function: Callable[..., Any]) -> None:
        """Calls of the operation go to `function` from now on."""
        setattr(self, op, function)

    if TYPE_CHECKING:  # the attributes that __init__ sets

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def __str__(self) -> str:
        return " ".join(f"{op}={name}" for op, name in self.chosen.items())


def operation(contract: Callable) -> Callable:
    """Declares an operation: the decorated function supplies name, signature and docstring.

    Quire's own are in ops.py. A plugin's needs an implementation named `reference` that runs
    everywhere. Raises InvalidParameterError if there is an operation of this name already.

    Returns a function for occasional calls, which runs the default choice for its arguments' device
    and dtype: the one named, or that of the first floating-point tensor.
    """
    name = contract.__name__
    if name in CONTRACTS:
        raise InvalidParameterError(
            "contract", f"there is an operation {name!r} already, of {CONTRACTS[name].__module__}"
        )
    CONTRACTS[name] = contract
    _implementations[name] = {}

    @functools.wraps(contract)
    def call(*args, **kwargs):
        values = [
            item
            for value in (*args, *kwargs.values())
            for item in (value if isinstance(value, list) else [value])
        ]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        named = [value for value in values if isinstance(value, torch.dtype)]
        found = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
        dtype = (*named, *found, torch.float32)[0]
        return getattr(_default_table(tensors[0].device.type, dtype), name)(*args, **kwargs)

    _functions[name] = call
    return call


def function(op: str) -> Callable:
    """Returns what `operation` returned for `op`, which runs the default choice for each call's
    arguments.
    """
    _check_op("op", op)
    return _functions[op]


def withdraw(op: str) -> None:
    """Removes a plugin's operation with its implementations. Selected tables keep it."""
    _check_op("op", op)
    for by_name in (CONTRACTS, _functions, _implementations):
        del by_name[op]
    _default_table.cache_clear()


def register(
    op: str,
    *,
    name: str,
    predicate: Callable[[Facts], bool] = lambda facts: True,
    priority: int = 100,
    is_native: bool = False,
) -> Callable:
    """Decorator: registers a function as the implementation `name` of the operation `op`.

    It works from any package. Of the implementations whose predicate holds, the one with the
    highest priority is selected (Quire's own: reference 0, cpu 10, native 15, triton 20), so an
    external one wins by default. `is_native`: it computes with a NativeFunction alone
    (kernels/cpu/native/external.py), and models that use it stay one native call per step. Raises
    InvalidParameterError if its parameters are not named as in the contract, or if the name is
    taken.
    """
    _check_op("op", op)

    def add(function: Callable) -> Callable:
        expected, given = (list(inspect.signature(f).parameters) for f in (CONTRACTS[op], function))
        if given != expected:
            problem = (
                f"{op} takes ({', '.join(expected)}), "
                f"but implementation {name!r} takes ({', '.join(given)})"
            )
            raise InvalidParameterError("function", problem)
        if name in _implementations[op]:
            raise InvalidParameterError(
                "name", f"{op} already has an implementation {name!r}; unregister it first"
            )
        _implementations[op][name] = Implementation(
            op, name, function, predicate, priority, is_native
        )
        _default_table.cache_clear()
        return function

    return add


def with_forms(**forms: Any) -> Callable[[Callable], Callable]:
    """Decorator: adds the attributes that the implementation of a packing operation may have
    (ops.py: pack_linear, pack_gguf_linear).
    """

    def add(function: Callable) -> Callable:
        vars(function).update(forms)
        return function

    return add


def unregister(op: str, name: str) -> None:
    """Removes an implementation. Tables that are already selected keep it."""
    _check_name("name", op, name)
    del _implementations[op][name]
    _default_table.cache_clear()


def import_when_asked(device: str, module: str) -> None:
    """Names a module that registers implementations for `device`, imported when they are needed.

    Importing Triton takes a third of a second.
    """
    _unimported[device] = module


def import_implementations(device: str) -> None:
    """Imports the modules that register implementations for `device`."""
    if (module := _unimported.pop(device, None)) is not None:
        import_module(module)


def implementations(op: str) -> tuple[Implementation, ...]:
    """Returns all implementations of one operation, in order of registration."""
    _check_op("op", op)
    return tuple(_implementations[op].values())


def select(
    device: str | torch.device,
    dtype: torch.dtype,
    overrides: Mapping[str, str] | None = None,
    **sizes: Any,
) -> OpTable:
    """Selects one implementation per operation and logs the table.

    `overrides` (config.device_config.kernels) maps operation to implementation's name; `sizes` are
    the remaining fields of Facts. Raises InvalidParameterError for an unknown operation or name (it
    lists the valid ones), and for an override that cannot run here.
    """
    facts = Facts(torch.device(device).type, dtype, **sizes)
    import_implementations(facts.device)
    overrides = overrides or {}
    for op, name in overrides.items():
        _check_op("kernels", op)
        _check_name("kernels", op, name)
    table = OpTable({op: _choose(op, facts, overrides.get(op)) for op in CONTRACTS})
    logger.debug("kernels for %s %s: %s", facts.device, facts.dtype, table)
    return table


def _choose(op: str, facts: Facts, override: str | None) -> Implementation:
    if override is not None:
        chosen = _implementations[op][override]
        if not chosen.predicate(facts):
            raise InvalidParameterError(
                "kernels", f"implementation {override!r} of {op} does not run with {facts}"
            )
        return chosen
    able = [i for i in _implementations[op].values() if i.predicate(facts)]
    if not able:
        raise InvalidParameterError(
            "kernels",
            f"no implementation of {op} (of {CONTRACTS[op].__module__}) runs with {facts}; it "
            "needs one named 'reference' that runs everywhere",
        )
    return max(able, key=lambda i: i.priority)  # the first of equals: the one registered first


@functools.cache
def _default_table(device: str, dtype: torch.dtype) -> OpTable:
    return select(device, dtype)


def _check_op(parameter: str, op: str) -> None:
    if op not in CONTRACTS:
        raise InvalidParameterError(
            parameter, f"unknown operation {op!r}; there are: {', '.join(CONTRACTS)}"
        )


def _check_name(parameter: str, op: str, name: str) -> None:
    if name not in _implementations[op]:
        raise InvalidParameterError(
            parameter,
            f"{op} has no implementation {name!r}; there are: {', '.join(_implementations[op])}",
        )
