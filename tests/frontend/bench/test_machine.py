"""The machine's description and its measured speed."""

import json
import socket
from pathlib import Path

import pytest
from quire.frontend.bench.machine import describe_machine, measure_read_bandwidth


def test_the_description_is_json_without_names_of_users_or_hosts() -> None:
    text = json.dumps(describe_machine())
    assert all(
        describe_machine()[key]
        for key in ("processor", "num_cores", "memory_gib", "system", "python", "quire")
    )
    assert socket.gethostname() not in text and str(Path.home()) not in text


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_bandwidth_is_measured_with_a_time_limit_of_zero(num_threads: int) -> None:
    assert 1e6 < measure_read_bandwidth(4 * 2**20, num_threads, seconds=0.0) < 1e14
