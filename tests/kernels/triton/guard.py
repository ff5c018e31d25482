"""Makes Triton's CPU interpreter stricter: bf16 and fp8 are rounded as on a GPU, every address is
checked, and races between programs are found.

Importing it patches the interpreter of this process; TRITON_INTERPRET=1 must be set before triton
is imported. An invalid kernel fails with an InterpreterError that names the KernelFault. Programs
run one after another, so a race shows only as memory that two programs of one launch access, at
least one of them writing. It is no race if the first program accessed the memory before an atomic
of acquire-release order at GPU scope, and the second one accesses it after such an atomic. `with
unordered(): ...` disables the search for races.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton._C.libtriton.ir import MEM_SEMANTIC, MEM_SYNC_SCOPE
from triton.runtime.interpreter import InterpreterBuilder as Builder
from triton.runtime.interpreter import TensorHandle

MANY = -1  # several readers


class KernelFault(AssertionError):
    """A kernel does something that a GPU would reject or compute differently."""


# --- bf16: the interpreter stores it as uint16, truncates when it rounds, and adds and multiplies
# the bits ---


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: np.ndarray) -> np.ndarray:
    """Rounds to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest)


def is_bf16(value: object) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def as_f32(value: TensorHandle) -> TensorHandle:
    return TensorHandle(widened(value.data), tl.float32) if is_bf16(value) else value


# e4m3: 3 bits of fraction and 4 of exponent, of which 0 means a denormal; the last number is NaN.
FP8 = np.array(
    [
        np.ldexp(8 + bits % 8, bits // 8 - 10) if bits >= 8 else np.ldexp(bits, -9)
        for bits in range(127)
    ]
    + [np.nan],
    np.float32,
)
FP8_MIDDLES = (FP8[:126] + FP8[1:127]) / 2


def to_fp8(values: np.ndarray) -> np.ndarray:
    """f32 -> bits of e4m3, as PTX's only conversion: to nearest, ties to even; values beyond 448
    become 448; NaN stays NaN.
    """
    # the lower number next to each midpoint
    above = np.searchsorted(FP8_MIDDLES, np.abs(values))
    is_tie = above != np.searchsorted(FP8_MIDDLES, np.abs(values), side="right")
    bits = np.where(np.isnan(values), 127, above + (is_tie & (above % 2 == 1)))
    return (bits + 128 * np.signbit(values)).astype(np.uint8)


def from_fp8(bits: np.ndarray) -> np.ndarray:
    return np.where(bits >= 128, -FP8[bits % 128], FP8[bits % 128])


def _cast(original):
    def cast(self, source, target, *rounding):
        wanted = target.scalar
        # the interpreter rounds ties upwards, and small numbers differently
        if wanted == tl.float8e4nv and source.dtype.scalar == tl.float32:
            return TensorHandle(to_fp8(source.data), tl.float8e4nv)
        if source.dtype.scalar == tl.float8e4nv and wanted != tl.float8e4nv:
            widened_source = TensorHandle(from_fp8(source.data), tl.float32)
            return (
                widened_source
                if wanted == tl.float32
                else cast(self, widened_source, target, *rounding)
            )
        if is_bf16(source) and wanted != tl.bfloat16:
            return (
                original(self, as_f32(source), target, *rounding)
                if wanted != tl.float32
                else as_f32(source)
            )
        if wanted == tl.bfloat16 and not is_bf16(source):
            return TensorHandle(rounded(source.data.astype(np.float32)), tl.bfloat16)
        return original(self, source, target, *rounding)

    return cast


def _dot(original):
    def wide(value):
        if value.dtype.scalar == tl.float8e4nv:
            return TensorHandle(from_fp8(value.data), tl.float32)
        return as_f32(value)

    return lambda self, a, b, *rest: original(self, wide(a), wide(b), *rest)


def _refuse_bf16(original):
    def operate(self, *args):
        if any(is_bf16(arg) for arg in args):
            raise KernelFault(
                "arithmetic in bf16: use .to(tl.float32) first, and round where the contract says "
                "so"
            )
        result = original(self, *args)
        # A comparison keeps the type of its operands; otherwise a scalar comparison would turn the
        # mask that it becomes part of into integers.
        return TensorHandle(result.data, tl.int1) if result.data.dtype == bool else result

    return operate


def _refuse_bf16_sums(original):
    def apply(self, input):
        if any(
            value.dtype.scalar == tl.bfloat16
            for value in (input if isinstance(input, tuple) else (input,))
        ):
            raise KernelFault("a reduction or scan in bf16: use .to(tl.float32) first")
        return original(self, input)

    return apply


# --- addresses: each one must be in a tensor that was passed to the kernel, and two programs may
# not access the same one ---


class Watch:
    """The accesses of one launch's programs so far: for each byte at which an element begins, its
    writer and its reader.
    """

    def __init__(self) -> None:
        self.races = True  # races are searched
        self.reachable: list = []  # tensors whose addresses a kernel reads from memory
        self.bases = np.zeros(0, np.uint64)

    def start(self, tensors: list) -> None:
        """Begins a launch with these tensors."""
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in (*tensors, *self.reachable)
        }
        sizes = sorted((base, size) for base, size in storages.items() if size)
        self.bases = np.array([base for base, _ in sizes], np.uint64)
        self.remapped: set[frozenset[int]] = set()  # views of Triton's language
        # 0: none, otherwise 1 + the program. Zeroed memory is only allocated where it is touched.
        self.regions = [
            (base, size, np.zeros(size, np.int32), np.zeros(size, np.int32)) for base, size in sizes
        ]
        # for programs after an atomic: the number of their later accesses
        self.names: dict[int, int] = {}
        self.released: list[int] = []  # numbers of accesses that precede an atomic
        # program -> the numbers that were released at its last atomic
        self.acquired: dict[int, list[int]] = {}

    def hand_over(self) -> None:
        """An atomic of acquire-release order: releases the program's accesses so far, and acquires
        all that were released before.
        """
        program = self._program()
        self.released.append(self.names.get(program, program))
        self.acquired[program] = list(self.released)
        self.names[program] = 2**30 + len(self.released)

    def _program(self) -> int:
        (x, y, z), (_, height, depth) = (
            interpreter.interpreter_builder.grid_idx,
            interpreter.interpreter_builder.grid_dim,
        )
        return 1 + (x * height + y) * depth + z

    def touch(
        self, pointers: TensorHandle, mask: np.ndarray | None, write: bool, atomic: bool = False
    ) -> None:
        addresses = (
            pointers.data if mask is None else np.broadcast_to(pointers.data, mask.shape)[mask]
        )
        addresses = np.ravel(addresses).astype(np.uint64)
        size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        place = interpreter.interpreter_builder.grid_idx
        owners = np.searchsorted(self.bases, addresses, side="right").astype(np.int64) - 1
        for owner in np.unique(owners):
            base, num_bytes, writers, readers = (
                self.regions[owner] if owner >= 0 else (0, 0, None, None)
            )
            offsets = (addresses[owners == owner] - np.uint64(base)).astype(np.int64)
            if (offsets + size > num_bytes).any():
                raise KernelFault(
                    f"out of bounds: a {'store' if write else 'load'} by program {place}"
                )
            if self.races and not atomic:
                self._note(writers, readers, offsets, write, place)

    def _note(
        self,
        writers: np.ndarray,
        readers: np.ndarray,
        offsets: np.ndarray,
        write: bool,
        place: tuple[int, int, int],
    ) -> None:
        program, known = self._program(), self.acquired.get(self._program(), ())
        program = self.names.get(program, program)
        wrote, read = (
            np.where((who == program) | np.isin(who, known), 0, who) if len(known) else who
            for who in (writers[offsets], readers[offsets])
        )
        if ((wrote != 0) & (wrote != program)).any():
            raise KernelFault(
                f"race: program {place} {'writes' if write else 'reads'} what another one writes"
            )
        if not write:
            readers[offsets] = np.where((read == 0) | (read == program), program, MANY)
        elif ((read != 0) & (read != program)).any():
            raise KernelFault(f"race: program {place} writes what another one reads")
        else:
            if len(np.unique(offsets)) != len(offsets):
                raise KernelFault(f"race: program {place} stores to one address twice at once")
            writers[offsets] = program


watch = Watch()


@contextmanager
def unordered() -> Iterator[None]:
    """For a kernel whose programs share memory in another way: checks bounds, but not races."""
    watch.races = False
    try:
        yield
    finally:
        watch.races = True


@contextmanager
def reachable(tensors: list) -> Iterator[None]:
    """For a kernel that reads the addresses of these tensors from memory."""
    watch.reachable = tensors
    try:
        yield
    finally:
        watch.reachable = []


def _load(original):
    def load(self, pointers, mask, *rest):
        watch.touch(pointers, mask.data, write=False)
        return original(self, pointers, mask, *rest)

    return load


def _store(original):
    def store(self, pointers, value, mask, *rest):
        watch.touch(pointers, mask.data, write=True)
        return original(self, pointers, value, mask, *rest)

    return store


def _exchange(original):
    def exchange(self, pointers, *rest):
        watch.touch(pointers, None, write=True, atomic=True)
        return original(self, pointers, *rest)

    return exchange


def _combine(original):
    def combine(self, operation, pointers, value, mask, *rest):
        watch.touch(pointers, mask.data, write=True, atomic=True)
        semantics, scope = rest
        if semantics == MEM_SEMANTIC.ACQUIRE_RELEASE and scope != MEM_SYNC_SCOPE.CTA:
            watch.hand_over()
        return original(self, operation, pointers, value, mask, *rest)

    return combine


def _start(original):
    def start(self, args, kwargs):
        on_host = original(self, args, kwargs)
        watch.start(
            [arg for arg in (*on_host[0], *on_host[1].values()) if hasattr(arg, "untyped_storage")]
        )
        return on_host

    return start


def _index(original):
    """numpy >= 2.4 does not convert an array to an integer; Triton 3.6 needs it for arrays of one
    element.
    """

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    return patch


def _once(original):
    """The interpreter remaps Triton's language at every function call of a kernel, which takes most
    of its time. Once per launch suffices: for the kernel's own view of the language, which it
    restores at the end, and for each other view.
    """

    def patch(kernel):
        views = frozenset(
            id(value) for value in kernel.__globals__.values() if value is tl or value is tl.core
        )
        if views not in watch.remapped:
            watch.remapped.add(views)
            return original(kernel)

    return patch


def _numpy_type(original):
    """The interpreter makes a table of all types at each call."""
    of_scalar = cache(original)

    def numpy_type(kind):
        element = kind.element_ty if kind.is_block() else kind
        return np.dtype(np.uint64) if element.is_ptr() else of_scalar(element)

    return numpy_type


def _without_overflow(options):
    """The interpreter computes each sum and product of integers once more in int64, for an
    assertion that it makes in its debug mode only.
    """
    return replace(options, sanitize_overflow=False)


PATCHES = (
    (Builder, "cast_impl", _cast),
    (Builder, "create_fp_to_fp", _cast),
    (Builder, "create_dot", _dot),
    (Builder, "binary_op", _refuse_bf16),
    (Builder, "unary_op", _refuse_bf16),
    (Builder, "create_fma", _refuse_bf16),
    (interpreter.ReduceOps, "apply", _refuse_bf16_sums),
    (interpreter.ScanOps, "apply", _refuse_bf16_sums),
    (Builder, "create_masked_load", _load),
    (Builder, "create_masked_store", _store),
    (Builder, "create_atomic_cas", _exchange),
    (Builder, "create_atomic_rmw", _combine),
    (interpreter.GridExecutor, "_init_args_hst", _start),
    (interpreter, "_patch_lang_tensor", _index),
    (interpreter, "_patch_lang", _once),
    (interpreter, "_get_np_dtype", _numpy_type),
    (interpreter.interpreter_builder, "options", _without_overflow),
)
for owner, name, patch in PATCHES:
    setattr(owner, name, patch(getattr(owner, name)))
