"""The memory of a batch does not depend on the size of its file."""

import json
import subprocess
import sys

import pytest
from quire.tests.bench import bench_batches


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    """Ten times as many lines take eight bytes each for their ids, and one for the journal."""
    command = [sys.executable, bench_batches.__file__, "memory", "--lines"]
    found = []
    for num_lines in (10_000, 100_000):
        done = subprocess.run(
            [*command, str(num_lines)], capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout))
    less, more = found
    assert more["output_mib"] > 40
    assert more["growth_mib"] < less["growth_mib"] + 10, found
