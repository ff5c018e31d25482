"""Finds the compiled library, chooses the instruction set, runs calls.

Must not know: tensors, operations.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

from .calls import ABI_VERSION, Call, Step

logger = logging.getLogger(__name__)

ISAS = ("amx", "avx512", "avx2")  # the best first


class Library:
    """The loaded library. One set of threads and one instruction set per process, whoever calls."""

    def __init__(self, path: Path):
        self._dll = ctypes.CDLL(str(path))
        if (version := self._dll.quire_abi_version()) != ABI_VERSION:
            raise OSError(
                f"{path} has interface {version}, this package needs {ABI_VERSION}: build it again "
                f"(pip install)"
            )
        self._dll.quire_wake.restype = None
        self._dll.quire_run.argtypes = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
        self._dll.quire_pack_linear.argtypes = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int32,
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_void_p,
        )
        # that this processor can run
        self.isas = tuple(isa for isa in ISAS if self._dll.quire_isa_supported(isa.encode()))
        self.isa: str | None = None

    def use_isa(self, isa: str) -> None:
        """For all later calls. Raises ValueError if this processor has it not."""
        if self._dll.quire_use_isa(isa.encode()) != 0:
            raise ValueError(
                f"instruction set {isa!r} is not to be had here; there are: "
                f"{', '.join(self.isas) or 'none'}"
            )
        self.isa = isa

    def set_num_threads(self, num_threads: int, cores: list[int] | None = None) -> None:
        """For all later calls; the caller's thread is one of them.

        Raises OSError if the system gives no more.

        `cores`: the core that each is pinned to, -1: none. By default each has one of its own if
        there are as many as the process may use; otherwise the system finds free ones. The caller's
        is not pinned: where it is found on another's core, that thread moves to the first.
        """
        if cores is None:
            allowed = sorted(os.sched_getaffinity(0))
            cores = allowed if len(allowed) == num_threads else [-1] * num_threads
        if num_threads < 1 or len(cores) != num_threads:
            raise ValueError(
                f"num_threads must be at least 1, with a core for each, not {num_threads} with "
                f"{len(cores)}"
            )
        if self._dll.quire_set_threads(num_threads, (ctypes.c_int32 * num_threads)(*cores)) != 0:
            raise OSError(
                f"the system gives this process no {num_threads} threads; native kernels run on "
                f"the caller's alone"
            )

    def wake(self) -> None:
        """A hint that a run comes within a tenth of a millisecond: threads that sleep wake up while
        the caller prepares it.
        """
        self._dll.quire_wake()

    def run(self, call: Call, step: Step) -> None:
        """One operation, now. Its operands must stay alive until it returns."""
        pointer = ctypes.c_void_p(ctypes.addressof(call))
        self._check(self._dll.quire_run(ctypes.addressof(pointer), 1, ctypes.addressof(step)))

    def run_all(self, pointers: ctypes.Array, step: Step) -> None:
        """The calls at `pointers`, an array of their addresses, in order."""
        self._check(
            self._dll.quire_run(ctypes.addressof(pointers), len(pointers), ctypes.addressof(step))
        )

    def pack_linear(
        self,
        weight: int,
        weight_row: int,
        dtype: int,
        out_features: int,
        in_features: int,
        packed: int,
    ) -> None:
        """abi.h: quire_pack_linear. Addresses of the weight and of memory for the packed one."""
        self._dll.quire_pack_linear(weight, weight_row, dtype, out_features, in_features, packed)

    def _check(self, result: int) -> None:
        if result != 0:
            raise RuntimeError(
                f"call {-1 - result} is no operation that the native kernels have for {self.isa}"
            )


def _load(choice: str | None) -> Library | None:
    """The library with its best instruction set; None, with a notice, where there is none to use.

    `choice`: "0" for none, or another's path.
    """
    if choice == "0":
        return None
    path = Path(choice) if choice else Path(__file__).with_name("_native.so")
    if not choice and not path.exists():
        logger.warning(
            "native CPU kernels are not built (no C++ compiler at installation): torch's serve, "
            "several times slower"
        )
        return None
    try:
        loaded = Library(path)
    except OSError as error:
        logger.warning(
            "native CPU kernels cannot be loaded, torch's serve, several times slower: %s", error
        )
        return None
    if not loaded.isas:
        logger.warning(
            "native CPU kernels need a processor with AVX2: torch's serve, several times slower"
        )
        return None
    loaded.use_isa(loaded.isas[0])
    return loaded


library = _load(os.environ.get("QUIRE_NATIVE"))
