"""A daemon on the bundled model for all tests of the command line that generate."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from quire.tests.frontend.cli.command import running_daemon


@pytest.fixture(scope="package")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_daemon(tmp_path_factory.mktemp("daemon") / "engine.sock") as found:
        yield found
