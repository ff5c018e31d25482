"""A plugin of pytest that records native calls which tests make, for test_aarch64.py.

QUIRE_RECORDED=FILE pytest -p quire.tests.kernels.native.record_calls ...
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from quire.tests.kernels.native.crossed import Recording, recorded

MOST_PER_TEST = 6  # calls of an operation in a dtype

_all = Recording()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """Records what a test and its fixtures call."""
    with recorded(MOST_PER_TEST) as recording:
        result = yield
    _all.records += recording.records
    _all.left_out += recording.left_out
    return result


def pytest_sessionfinish() -> None:
    Path(os.environ["QUIRE_RECORDED"]).write_bytes(pickle.dumps(_all))
