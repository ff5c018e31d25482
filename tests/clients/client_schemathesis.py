"""schemathesis with the server's own OpenAPI description: bodies that match the schemas, and bodies
that do not, on every route.

A body that matches its schema may still be refused. A schema cannot express a grammar that does not
compile, a prompt beyond the context, or two fields that exclude each other.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import run

REQUIREMENTS = {"schemathesis": "schemathesis"}
DISTRIBUTION = "schemathesis"
FLAGS = ["--max-model-len", "64"]  # flags of the server: answers of any length must be short
LEAST_CASES = 1000


def check_description(address: str, _: str) -> None:
    command = [
        str(Path(sys.executable).parent / "schemathesis"),
        "run",
        f"{address}/openapi.json",
        "--phases",
        "coverage,fuzzing",
        "--max-examples",
        "20",
        "--seed",
        "1",
        "--continue-on-failure",
        "--no-shrink",
        "--request-timeout",
        "60",
        "--exclude-checks",
        "positive_data_acceptance",
    ]
    with tempfile.TemporaryDirectory() as directory:  # it writes a cache into its working directory
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=directory)
    cases = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    failures = done.stdout.partition("= FAILURES =")[2].partition("= WARNINGS =")[0]
    assert done.returncode == 0 and cases and cases[1] == cases[2], (
        failures[:8000] + done.stdout[-600:]
    )
    assert int(cases[1]) >= LEAST_CASES
    print(f"{cases[1]} cases", file=sys.stderr)


if __name__ == "__main__":
    run(globals(), DISTRIBUTION)
