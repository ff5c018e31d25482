"""A daemon on the bundled model for all tests of the command line that generate."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from quire.tests.frontend.cli.command import ONE_THREAD, QUIRE


@pytest.fixture(scope="package")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon on the bundled model, ended by SIGTERM; it must exit with 0."""
    path = tmp_path_factory.mktemp("daemon") / "engine.sock"
    with subprocess.Popen(
        [*QUIRE, "engine", "--listen", f"ipc://{path}", *ONE_THREAD],
        stderr=subprocess.PIPE,
        text=True,
    ) as daemon:
        while not path.exists():
            assert daemon.poll() is None, daemon.stderr.read()
            time.sleep(0.05)
        yield f"ipc://{path}"
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(timeout=60) == 0
        assert not path.exists()
        assert "Traceback" not in daemon.stderr.read()
