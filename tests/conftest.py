"""Fixtures and options for all tests."""

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
# The repository root holds packages named core, ipc and kernels. On sys.path they would shadow
# packages of the same name (transformers probes for `kernels`).
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]

# A shell without job control ignores SIGINT for what it starts in the background, and programs hand
# that on to those that they start. Tests of Ctrl-C need programs that it interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A time limit of each example would measure the other programs of the machine.
settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quire")

# OpenMP's wait policy is fixed when torch is first imported, and tests may import torch before the
# engine does.
import quire.executor  # noqa: E402, F401
from quire.tests import garbage  # noqa: E402
from quire.tests.engine_device import use_device, use_invariant_kernels  # noqa: E402
from quire.tests.not_on_a_gpu import needs_invariance, reason_for  # noqa: E402
from quire.tests.samples import mark_rest_slow  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="where engines run whose test names no device",
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the rest of a sample to `-m slow`. Skips on a GPU what cannot pass there, with its
    reason.
    """
    mark_rest_slow(items)
    if config.getoption("--device") == "cpu":
        return
    for item in items:
        if (reason := reason_for(item.nodeid)) is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)  # before the fixtures of the test, which may make engines
def pytest_runtest_setup(item: pytest.Item) -> None:
    use_invariant_kernels(needs_invariance(item.nodeid))


def pytest_collection_finish() -> None:
    garbage.end_collection()


def pytest_configure(config: pytest.Config) -> None:
    garbage.begin_collection()
    use_device(config.getoption("--device"))
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist is installed
        # It would begin with the files of most tests. The order is that of
        # tests/kernels/native/conftest.py.
        config.option.loadscopereorder = False


def pytest_unconfigure() -> None:
    garbage.end_run()
