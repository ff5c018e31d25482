"""The instruction sets that a test of native kernels runs on: the processor's own, and emulated
ones that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from quire.kernels.cpu.native.library import ISAS, Library, library
from quire.tests.kernels.native.compiled import EMULATED, compile_library, find_compiler

NEEDS_LIBRARY = (
    "native kernels are not built here (no C++ compiler at installation, QUIRE_NATIVE=0, "
    "or no AVX2)"
)


COMPILE_TIMEOUT_S = 600  # for the test that compiles the emulated library


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "emulated_library" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(COMPILE_TIMEOUT_S))


@contextmanager
def redirect_to(original: Library, other: Library) -> Iterator[None]:
    """Redirects every wrapper's calls to another compiled library."""
    saved = dict(vars(original))
    vars(original).update(vars(other))
    try:
        yield
    finally:
        vars(original).clear()
        vars(original).update(saved)


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory) -> Callable[[], Library]:
    """The library that emulates what the processor lacks, compiled once at its first use."""
    made: list[Library] = []

    def get() -> Library:
        if not made:
            if find_compiler() is None:
                pytest.skip("no C++ compiler to emulate this instruction set with")
            made.append(
                Library(compile_library(tmp_path_factory.mktemp("emulated"), *EMULATED, "-O1"))
            )
        return made[0]

    return get


@pytest.fixture(params=ISAS)
def isa(request, emulated_library) -> Iterator[str]:
    """A test with this fixture runs once per instruction set, whatever the processor has; all
    wrappers of native kernels use it.
    """
    if library is None:
        pytest.skip(NEEDS_LIBRARY)
    before = library.isa
    if request.param in library.isas:
        library.use_isa(request.param)
        yield request.param
        library.set_num_threads(1)
        library.use_isa(before)
    else:
        other = emulated_library()
        other.use_isa(request.param)
        with redirect_to(library, other):
            yield request.param
            library.set_num_threads(1)
