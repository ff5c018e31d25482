"""Which of these tests a process can run: kernels are decorated either for the interpreter or for the compiler.
May know: TRITON_INTERPRET, whether Triton is installed, Triton's driver.
Must not know: any kernel."""

import os
from importlib.util import find_spec

import pytest

if find_spec("triton") is None:
    collect_ignore_glob = ["*"]
elif os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore_glob = ["budgets/*", "test_*.py"]
else:
    collect_ignore_glob = ["interpreted/*"]


@pytest.fixture(scope="session", autouse=True)
def compiler_cache(tmp_path_factory):
    """What the compiler keeps goes away with the tests, and nothing that an earlier run left is believed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
