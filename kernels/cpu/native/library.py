"""Loads the compiled library, selects the instruction set and runs calls.

Must not know: tensors, operations.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from pathlib import Path
from typing import cast

from ....ipc.operating_system import SYSTEM
from .calls import ABI_VERSION, LATE, LOST, BlockLayout, Call, Step

logger = logging.getLogger(__name__)

# Of this kind of processor, best first
ISAS = (
    ("neon_bf16", "neon_i8mm", "neon_dotprod", "neon")
    if platform.machine() in ("aarch64", "arm64")
    else ("amx", "avx512_bf16", "avx512", "avx2")
)


class ExchangeError(RuntimeError):
    """A run has ended because another rank did not come. What it computed is of no use."""


class Library:
    """The loaded library. The process has one set of threads and one instruction set."""

    def __init__(self, path: Path):
        self._dll = ctypes.CDLL(str(path))
        if (version := self._dll.quire_abi_version()) != ABI_VERSION:
            raise OSError(
                f"{path} has ABI version {version}, this package needs {ABI_VERSION}: rebuild it "
                f"(pip install)"
            )
        self._dll.quire_wake.restype = None
        address, number, count = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
        self._dll.quire_run.argtypes = address, number, address
        self._dll.quire_run_timed.argtypes = address, number, address, address, number
        self._dll.quire_pack_linear.argtypes = address, count, number, count, count, address
        self._dll.quire_pack_blocks.argtypes = address, count, count, address, address, address
        # This processor can run these.
        self.isas = tuple(isa for isa in ISAS if self._dll.quire_isa_supported(isa.encode()))
        self.isa: str | None = None

    def use_isa(self, isa: str) -> None:
        """Selects the instruction set of all later calls.

        Raises ValueError if this processor does not have it.
        """
        if self._dll.quire_use_isa(isa.encode()) != 0:
            raise ValueError(
                f"instruction set {isa!r} is not available here; available: "
                f"{', '.join(self.isas) or 'none'}"
            )
        self.isa = isa

    def set_num_threads(self, num_threads: int, cores: list[int] | None = None) -> None:
        """Sets the number of threads of all later calls; the caller's thread is one of them.

        `cores`: the core that each thread is pinned to, or -1. By default each thread has its own
        core if there are as many as the process may use; otherwise the system schedules them. The
        caller's thread is not pinned: if it runs on another thread's core, that thread moves to the
        first core. Raises OSError if the system does not start the threads.
        """
        if cores is None:
            allowed = SYSTEM.cores()
            cores = allowed if len(allowed) == num_threads else [-1] * num_threads
        if num_threads < 1 or len(cores) != num_threads:
            raise ValueError(
                f"num_threads must be at least 1, with a core for each, not {num_threads} with "
                f"{len(cores)}"
            )
        if self._dll.quire_set_threads(num_threads, (ctypes.c_int32 * num_threads)(*cores)) != 0:
            raise OSError(
                f"the system does not start {num_threads} threads; native kernels run on "
                f"the caller's alone"
            )

    def wake(self) -> None:
        """Hints that a run follows within 0.1 ms, so that sleeping threads wake up while the caller
        prepares it.
        """
        self._dll.quire_wake()

    def run(self, call: Call, step: Step) -> None:
        """Runs one operation. Its operands must stay alive until this returns."""
        self.run_all((ctypes.c_void_p * 1)(ctypes.addressof(call)), step)

    def run_all(self, pointers: ctypes.Array, step: Step) -> None:
        """Runs the calls at `pointers`, an array of their addresses, in order."""
        result = self._dll.quire_run(
            ctypes.addressof(pointers), len(pointers), ctypes.addressof(step)
        )
        if result != 0:
            raise self._error(result)

    def run_all_timed(
        self, pointers: ctypes.Array, step: Step, times: int, num_threads: int
    ) -> None:
        """Works as run_all, and writes the times [len(pointers), num_threads, 2] i64 at the address
        `times` (see quire_run_timed in abi.h).
        """
        result = self._dll.quire_run_timed(
            ctypes.addressof(pointers),
            len(pointers),
            ctypes.addressof(step),
            times,
            num_threads,
        )
        if result != 0:
            raise self._error(result)

    def pack_linear(
        self,
        weight: int,
        weight_row: int,
        dtype: int,
        out_features: int,
        in_features: int,
        packed: int,
    ) -> None:
        """See quire_pack_linear in abi.h. Takes the addresses of the weight and of the packed
        memory.
        """
        self._dll.quire_pack_linear(weight, weight_row, dtype, out_features, in_features, packed)

    def pack_blocks(
        self,
        rows: int,
        num_rows: int,
        num_blocks: int,
        layout: BlockLayout,
        numbers: int,
        scales: int,
    ) -> None:
        """See quire_pack_blocks in abi.h. Takes the addresses of the rows' addresses and of the
        packed memory.
        """
        self._dll.quire_pack_blocks(
            rows, num_rows, num_blocks, ctypes.addressof(layout), numbers, scales
        )

    def _error(self, result: int) -> RuntimeError:
        if result == LOST:
            return ExchangeError("another rank has failed")
        if result > 0:
            return ExchangeError(
                f"rank {result - LATE} of those that share the layers does not come to where their "
                f"results are added: it hangs, or is stopped"
            )
        return RuntimeError(
            f"call {-1 - result} is not an operation of the native kernels for {self.isa}"
        )


def _load(choice: str | None) -> Library | None:
    """Loads the library with its best instruction set, or logs why there is none and returns None.

    `choice`: "0" disables it; any other text is the path of a library.
    """
    if choice == "0":
        return None
    path = Path(choice) if choice else Path(__file__).with_name("_native.so")
    if not choice and not path.exists():
        logger.warning(
            "native CPU kernels are not built (no C++ compiler at installation): "
            "torch's kernels run instead, several times slower"
        )
        return None
    try:
        loaded = Library(path)
    except OSError as error:
        logger.warning(
            "native CPU kernels cannot be loaded, "
            "torch's kernels run instead, several times slower: %s",
            error,
        )
        return None
    if not loaded.isas:
        logger.warning(
            "native CPU kernels need an aarch64 processor or x86 with AVX2: "
            "torch's kernels run instead, several times slower"
        )
        return None
    loaded.use_isa(loaded.isas[0])
    return loaded


# It is None where _load has logged why. No native kernel is registered then, and nothing else uses
# it.
library = cast(Library, _load(os.environ.get("QUIRE_NATIVE")))
