"""A plugin of pytest: each test FAULT_RUNS times (20), for test_each_fault_many_times."""

import os

import pytest

NUM_RUNS = int(os.environ.get("FAULT_RUNS", 20))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.fixturenames.append("run_number")
    metafunc.parametrize("run_number", range(NUM_RUNS))
