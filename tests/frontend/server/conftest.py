"""One real server for all server tests: `quire serve` in its own process with the bundled model,
used over HTTP.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from quire.tests.fake_engine import daemon
from quire.tests.fakes import make_config

START_TIMEOUT_S = 90


@contextmanager
def running_server(
    *flags: str, wait: bool = True, under: Sequence[str] = ()
) -> Iterator[httpx.Client]:
    """Run `quire serve` on a free port, ready if `wait`, under a command such as prlimit. Yield a
    client with two more attributes, `process` (its Popen) and `log` (a function).
    """
    command = [*under, sys.executable, "-m", "quire", "serve", "--port", "0", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)

        def read_log() -> str:
            return os.pread(log.fileno(), 10**6, 0).decode()

        try:
            with httpx.Client(base_url=address_in(read_log, process), timeout=200) as client:
                client.process, client.log = process, read_log
                if wait:
                    wait_until_ready(client)
                yield client
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            finally:
                process.kill()


def address_in(read_log: Callable[[], str], process: subprocess.Popen) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (match := re.search(r"http://\S+", read_log())):
        assert process.poll() is None and time.monotonic() < deadline, read_log()
        time.sleep(0.01)
    return match[0]


def wait_until_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while client.get("/health/ready").status_code != 200:
        assert client.process.poll() is None and time.monotonic() < deadline, client.log()
        time.sleep(0.05)


@pytest.fixture(scope="session")
def server() -> Iterator[httpx.Client]:
    with running_server() as client:
        yield client


@contextmanager
def slow_engine(delay_s: float, **settings: Any) -> Iterator[tuple[str, subprocess.Popen]]:
    """An engine (its address, its process) with the fake executor, whose steps take `delay_s`.
    Prompts are token ids, and there is no text.
    """
    defaults = {
        "max_model_len": 10_000,
        "num_gpu_blocks_override": 5001,
        "hf_overrides": {"delay_s": delay_s},
    }
    with (
        tempfile.TemporaryDirectory() as directory,
        daemon(Path(directory), make_config(**defaults | settings)) as engine,
    ):
        yield engine
