"""Names, places and sizes of the operations that a trace shows.

Must not know: when an operation ran, architectures, requests.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from ...ipc.trace import place_of, place_of_function
from ...kernels import work
from ...kernels.moe import Experts
from ...kernels.ops import AttentionMetadata
from ...kernels.work import Work
from .instruments import Site, address_of, tensors_of

MODELS = ("/executor/models/", "/transformers/models/")
# files whose functions call operations on behalf of a model's page
LAYERS = tuple(f"/executor/models/{name}.py" for name in ("layers", "linear", "packed_layers"))
WRAPPERS = ("/kernels/cpu/native/program.py", "/kernels/cpu/native/recorder.py")
# operations whose last tensor is a state, with the operations on numbers for each number of it
STATE_FLOPS = {
    "short_conv": 2,
    "gated_delta_rule": work.DELTA_RULE_FLOPS,
    "selective_scan": work.SCAN_FLOPS,
}
LOOKED_THROUGH = 12  # frames


class Argument:
    """What is kept of an operation's argument, which must not live longer than the step."""

    __slots__ = ("address", "dtype", "item_bytes", "shape")

    def __init__(self, tensor: Tensor):
        self.shape, self.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.item_bytes, self.address = tensor.itemsize, address_of(tensor)

    @property
    def num_bytes(self) -> int:
        size = self.item_bytes
        for count in self.shape:
            size *= count
        return size


class ReadExperts(NamedTuple):
    """What is kept of a call of fused_moe."""

    experts: Experts
    ids: Tensor  # of the experts that tokens have chosen

    def weight_bytes(self) -> int:
        """The bytes of the experts that were read."""
        chosen = [(self.experts.gate_up[i], self.experts.down[i]) for i in self.ids.unique()]
        return sum(one.nbytes for layers in chosen for x in layers for one in tensors_of(x))


def kept(arguments: Sequence[Any]) -> list[Any]:
    """What is kept of arguments: tensors without their data, the lengths in the metadata of
    attention, and numbers.
    """
    found: list[Any] = []
    for value in arguments:
        if isinstance(value, Tensor):
            found.append(Argument(value))
        elif isinstance(value, AttentionMetadata):
            found.append((list(value.query_lens), list(value.seq_lens_list)))
        elif isinstance(value, (int, float)):
            found.append(value)
        elif isinstance(value, Experts):  # of fused_moe
            found.append(ReadExperts(value, arguments[1].clone()))
    return found


def dtype_of(arguments: list[Any]) -> str:
    """The type of the first tensor of floating-point numbers, else of the first tensor."""
    tensors = [value for value in arguments if isinstance(value, Argument)]
    floats = [value.dtype for value in tensors if "float" in value.dtype]
    return (*floats, *(value.dtype for value in tensors), "")[0]


def work_of(site: Site, arguments: list[Any], weights: dict[int, int]) -> tuple[Work, int]:
    """The work of a call of an operation, and the bytes of weights that it reads."""
    tensors = [value for value in arguments if isinstance(value, Argument)]
    weight_bytes = site.weight_bytes + sum(weights.get(value.address, 0) for value in tensors)
    weight_bytes += sum(one.weight_bytes() for one in arguments if isinstance(one, ReadExperts))
    activations = [value for value in tensors if value.address not in weights]
    if site.op == "linear":
        x = tensors[0]
        columns_in, columns_out = site.sizes[0] or x.shape[-1], site.sizes[1]
        found = work.linear(x.shape[0], columns_in, columns_out, x.item_bytes, x.item_bytes)
        return found, weight_bytes
    if site.op == "paged_attention":
        query, key_cache = tensors[:2]
        query_lens, seq_lens = next(value for value in arguments if type(value) is tuple)
        # after the metadata: scale, sliding_window, …
        numbers = [value for value in arguments if isinstance(value, (int, float))]
        window = int(numbers[1]) if len(numbers) > 1 else 0
        return work.attention(
            query_lens,
            seq_lens,
            query.shape[1],
            key_cache.shape[2],
            query.shape[2],
            query.item_bytes,
            key_cache.item_bytes,
            window,
        ), weight_bytes
    if site.op in STATE_FLOPS:
        query_lens, _ = next(value for value in arguments if type(value) is tuple)
        x, state = tensors[0], tensors[-1]
        of_tokens = [value for value in activations[:-1] if value.shape[0] == x.shape[0]]
        result = tensors[2] if site.op == "gated_delta_rule" else x
        num_bytes = sum(value.num_bytes for value in (*of_tokens, result))
        sizes = state.shape[1:], state.item_bytes, num_bytes // x.shape[0]
        return work.states(query_lens, *sizes, STATE_FLOPS[site.op]), weight_bytes
    caches = [value for value in activations if len(value.shape) == 4]
    plain = [value for value in activations if value not in caches]
    if site.op == "embedding":
        ids = plain[0]
        return Work(f"[{ids.shape[0]}]", ids.num_bytes), 0
    shown = [value for value in plain if "float" in value.dtype] or plain
    shape = " ".join(str(list(value.shape)) for value in shown[:2])
    # other tensors, such as the table of rotary embeddings, are read in part
    rows = plain[0].shape[:1] if plain else ()
    num_bytes = sum(value.num_bytes for value in plain if value.shape[:1] == rows)
    return Work(shape, 2 * num_bytes), weight_bytes


def implementation_place(function: Any) -> str:
    """Where the function of a Site is defined."""
    function = getattr(function, "func", function)  # of functools.partial
    return place_of_function(function) or place_of_function(type(function).__call__)


def calling_place(frame: FrameType | None) -> str:
    """The line of the model's page among the frames around `frame`; "" outside of a model."""
    for _ in range(LOOKED_THROUGH):
        if frame is None:
            break
        name = frame.f_code.co_filename
        if not name.endswith(LAYERS) and any(folder in name for folder in MODELS):
            return place_of(name, frame.f_lineno)
        frame = frame.f_back
    return ""


def recorded_places() -> tuple[str, str]:
    """While a call is recorded: the line of the model's page, and the wrapper that made the
    call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and "/kernels/cpu/native/" not in frame.f_code.co_filename:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.endswith(WRAPPERS):
        frame = frame.f_back
    if frame is None:
        return "", ""
    return calling_place(frame), place_of(frame.f_code.co_filename, frame.f_code.co_firstlineno)
