"""The instruction sets that a test of native kernels runs on: the processor's own, and emulated
ones that it lacks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from quire.kernels.cpu.native.library import ISAS, Library, library
from quire.tests.kernels.native.compiled import begin_emulated, find_compiler, finish_emulated

EMULATED_DIRECTORY = pytest.StashKey[Path]()  # where the emulated library is compiled
NEEDS_LIBRARY = (
    "native kernels are not built here (no C++ compiler at installation, QUIRE_NATIVE=0, "
    "or no AVX2)"
)


COMPILE_TIMEOUT_S = 900  # for the test that waits for the emulated library


def needs_emulation(item: pytest.Item) -> bool:
    return "emulated_library" in getattr(item, "fixturenames", ())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests need the emulated library come last, since it is compiled beside the
    others, and those with most tests first among them.
    """
    counts = Counter(item.path for item in items if needs_emulation(item))
    items.sort(key=lambda item: (item.path in counts, -counts[item.path], item.path))
    for item in items:
        if needs_emulation(item):
            item.add_marker(pytest.mark.timeout(COMPILE_TIMEOUT_S))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins to compile the emulated library, if a test of this run needs it."""
    if library is None or find_compiler() is None or session.config.option.collectonly:
        return
    uses = [item for item in session.items if needs_emulation(item)]
    sets = {getattr(item, "callspec", None) and item.callspec.params.get("isa") for item in uses}
    if sets - set(library.isas):
        session.config.stash[EMULATED_DIRECTORY] = begin_emulated(session.config)


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
def emulated_library(pytestconfig: pytest.Config) -> Callable[[], Library]:
    """The library that emulates what the processor lacks, when it is compiled."""
    made: list[Library] = []

    def get() -> Library:
        if not made:
            directory = pytestconfig.stash.get(EMULATED_DIRECTORY, None)
            if directory is None:
                pytest.skip("no C++ compiler to emulate this instruction set with")
            made.append(Library(finish_emulated(directory)))
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
