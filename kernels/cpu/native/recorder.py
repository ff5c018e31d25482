"""Records a model's step as a list of calls, by running its code once on tensors without data.

Must not know: models, requests, what an operation computes.

    recorder = Recorder(limits)
    with recording(recorder):  # program.py: wrappers now pass their calls to the recorder
        hidden = model(recorder.token_ids, recorder.positions, recorder.metadata)
        ...
    program = Program(recorder, ...)  # replay.py: places the buffers and runs the calls together

A recorded tensor has an address of its own, which identifies what a call reads and writes. The
memory behind it is never written. The guard refuses any computation on recorded tensors outside
recorded calls, because the program would lack it.
"""

from __future__ import annotations

import bisect
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...ops import AttentionMetadata, ImageRows, StateRows, make_metadata
from .calls import ALL_LOGITS, ALL_TOKENS, Absent, Call, Ids, Step, Struct

# members of a Step, in the order of the columns of StateRows
STATE_INPUTS = "state_places", "last_positions", "copy_positions", "copy_places"
# of ImageRows
IMAGE_INPUTS = "image_rows", "position_offsets", "later_tokens"


class Unrecordable(Exception):
    """Why a model's step cannot be recorded."""


class Limits(NamedTuple):
    """The largest step that is recorded."""

    num_tokens: int  # T
    num_requests: int  # B
    num_logits: int  # R

    def exceeded_by(self, num_tokens: int, num_requests: int, num_logits: int) -> str | None:
        pairs = zip(self._fields, (num_tokens, num_requests, num_logits), self)
        return next(
            (
                f"{name} is {value}, but must be at most {most}"
                for name, value, most in pairs
                if value > most
            ),
            None,
        )


class Operand(NamedTuple):
    """The address in a call that belongs to a recorded tensor."""

    field: str
    buffer: int  # index into Recorder.buffers
    offset: int  # of the address within the buffer, in bytes


class Recorder:
    """Owns the recorded tensors.

    `token_ids`, `positions`, `metadata`, `logits_indices` and `token_types` stand for the step's
    own.
    """

    def __init__(
        self,
        limits: Limits,
        num_groups: int = 1,
        has_token_types: bool = False,
        has_adapters: bool = False,
        has_states: bool = False,
        has_images: bool = False,
        origin: Callable[[], Any] | None = None,
    ):
        """num_groups: how many groups of layers have block tables of their own. has_token_types:
        the model takes the type of each token. has_adapters: the model takes the LoRA adapter of
        each token. has_states: the model keeps states. has_images: the model reads images. origin:
        says, for traces, where the call that is being recorded comes from.
        """
        # The number of rows of an operand tells tokens from logits.
        num_logits = limits.num_logits + (limits.num_logits == limits.num_tokens)
        self.limits = limits
        self.calls: list[Call] = []
        self._origin = origin
        self._rows = {limits.num_tokens: ALL_TOKENS, num_logits: ALL_LOGITS}
        # The memory is kept alive, so that no address is used twice.
        self._memory: list[mmap.mmap] = []
        # It has (address, bytes) of every tensor that a call made, ascending.
        self.buffers: list[tuple[int, int]] = []
        self.token_ids = self._make((limits.num_tokens,), torch.int32)
        self.positions = self._make((limits.num_tokens,), torch.int64)
        self.logits_indices = self._make((num_logits,), torch.int64)
        self.token_types = (
            self._make((limits.num_tokens,), torch.int32) if has_token_types else None
        )
        unknown: Any = _Unknown()
        self.metadata = make_metadata(
            self._make((limits.num_requests + 1,), torch.int32),
            self._make((limits.num_requests,), torch.int32),
            [self._make((limits.num_requests, 1), torch.int32) for _ in range(num_groups)],
            [self._make((limits.num_tokens,), torch.int64) for _ in range(num_groups)],
            unknown,
            unknown,
            unknown,
            self._make((limits.num_tokens,), torch.int32) if has_adapters else None,
            self._make_states(limits.num_requests) if has_states else None,
            self._make_images(limits.num_tokens) if has_images else None,
        )
        self._part_ids: dict[int, int] = {}  # address of ids that part_ids made -> first id
        self._whole: int | None = None  # address of the query_start_loc that `whole` made
        # The key is the name of the step's member. Tensors are in order of groups where these have
        # their own.
        self._inputs = {
            "token_ids": [self.token_ids],
            "positions": [self.positions],
            "logits_indices": [self.logits_indices],
            "query_start_loc": [self.metadata.query_start_loc],
            "seq_lens": [self.metadata.seq_lens],
        }
        if self.token_types is not None:
            self._inputs["token_types"] = [self.token_types]
        if self.metadata.adapters is not None:
            self._inputs["adapters"] = [self.metadata.adapters]
        self._inputs |= self._inputs_of_rows()

    # ------------------------------------------------------------ called by program.py

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = self._make(shape, dtype)
        bisect.insort(self.buffers, (tensor.data_ptr(), tensor.nbytes))
        return tensor

    def num_rows(self, x: Tensor) -> int:
        if len(x) not in self._rows:
            raise Unrecordable(
                f"an operand has {len(x)} rows, where a step's tensors have "
                f"{' or '.join(map(str, self._rows))}"
            )
        return self._rows[len(x)]

    def part_ids(self, token_ids: Tensor, first_id: int) -> Tensor:
        """See program.part_ids."""
        if token_ids is not self.token_ids:
            raise Unrecordable("a part of a table is read with other token_ids than the step's")
        ids = self._make(token_ids.shape, torch.int32)
        self._part_ids[ids.data_ptr()] = first_id
        return ids

    def whole(self) -> AttentionMetadata:
        """Returns the metadata of all tokens as one request, for encoder_attention."""
        starts = self._make((2,), torch.int32)
        self._whole = starts.data_ptr()
        return replace(self.metadata, query_start_loc=starts)

    def submit(self, call: Call, step: Step) -> None:
        """Checks that the call reads this step's tensors and not copies that the model made, and
        sets which group's it reads.
        """
        for name, address in pointers(step):
            if name == "token_ids" and address in self._part_ids:
                call.first_id = self._part_ids[address]
                call.absent = Absent.ABSENT_ZEROS
                continue
            if name == "query_start_loc" and address == self._whole:
                call.is_whole = True
                continue
            if name == "token_ids" and self.token_types is not None:
                if address == self.token_types.data_ptr():
                    call.ids = Ids.TOKEN_TYPES
                    continue
            addresses = [tensor.data_ptr() for tensor in self._inputs[name]]
            if address not in addresses:
                raise Unrecordable(f"{type(call).__name__} reads other {name} than the step's")
            if group := addresses.index(address):
                call.group = group
        for name, tensor in (
            (name, tensor) for name, tensors in self._inputs.items() for tensor in tensors
        ):
            if any(
                tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes
                for _, address in pointers(call)
            ):
                raise Unrecordable(
                    f"{type(call).__name__} takes {name} as an operand, not from the step"
                )
        if self._origin is not None:
            call.origin = self._origin()
        self.calls.append(call)

    def _inputs_of_rows(self) -> dict[str, list[Tensor]]:
        """Where the blocks, states and images of requests are."""
        metadata = self.metadata
        groups = metadata.groups or (metadata,)
        found = {
            name: [getattr(group, name) for group in groups]
            for name in ("block_tables", "slot_mapping")
        }
        if metadata.states is not None:
            columns = vars(metadata.states).values()
            found |= {name: [x] for name, x in zip(STATE_INPUTS, columns)}
        if metadata.images is not None:
            columns = vars(metadata.images).values()
            found |= {name: [x] for name, x in zip(IMAGE_INPUTS, columns)}
        return found

    def _make_states(self, num_requests: int) -> StateRows:
        dtypes = torch.int32, torch.int64, torch.int64, torch.int32
        return StateRows(*(self._make((num_requests,), dtype) for dtype in dtypes))

    def _make_images(self, num_tokens: int) -> ImageRows:
        shapes = (num_tokens,), (3, num_tokens), (num_tokens,)
        return ImageRows(*(self._make(shape, torch.int32) for shape in shapes))

    def _make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        # Only addresses are used, and no page is touched.
        memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.append(memory)
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes].view(dtype).view(*shape)

    # ------------------------------------------------------------ after recording

    def operands(self, call: Call) -> list[Operand]:
        """Returns the recorded tensors of a call, which are valid once all calls are recorded."""
        return [
            Operand(name, *found)
            for name, address in pointers(call)
            if (found := self.find(address)) is not None
        ]

    def find(self, address: int) -> tuple[int, int] | None:
        """(buffer, offset) of an address, or None for an address of a weight or a cache."""
        index = bisect.bisect(self.buffers, (address, math.inf)) - 1
        start, num_bytes = self.buffers[index]
        return (index, address - start) if start <= address < start + num_bytes else None


class Guard(TorchDispatchMode):
    """Allows views of tensors and refuses every computation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Without this, torch imports its compiler (two seconds, 100 MB), which is never used here.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **kwargs or {}) if func.is_view else None
        # Operations that usually return views, like reshape, may copy.
        known = {
            _storage(value)
            for value in (*args, *(kwargs or {}).values())
            if isinstance(value, Tensor)
        }
        if result is None or any(
            _storage(view) not in known
            for view in (result if isinstance(result, (list, tuple)) else (result,))
        ):
            raise Unrecordable(f"{func} is none of the native kernels")
        return result


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def pointers(struct: Struct) -> list[tuple[str, int]]:
    """Returns the (field, address) of a call's operands or a step's inputs, without absent ones."""
    fields = ((name, getattr(struct, name)) for name in struct.pointers)
    return [(name, address) for name, address in fields if address is not None]


class _Unknown:
    """Stands for values that only a real step has on the host."""


def _refuse(self: _Unknown, *_: Any) -> Any:
    raise Unrecordable("the model or a kernel reads the lengths of a step's requests in Python")


for _name in (
    "bool",
    "int",
    "index",
    "float",
    "len",
    "iter",
    "getitem",
    "eq",
    "lt",
    "le",
    "gt",
    "ge",
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
):
    setattr(_Unknown, f"__{_name}__", _refuse)
