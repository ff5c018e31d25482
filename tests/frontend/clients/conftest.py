"""Fixtures that run a test over every form of client."""

from __future__ import annotations

import pytest
from quire.tests.frontend.clients.driver import FORMS, Driver


@pytest.fixture(params=FORMS)
def form(request) -> str:
    return request.param


@pytest.fixture
def open_driver(form, tmp_path):
    drivers = []

    def open_(**arguments) -> Driver:
        drivers.append(Driver(form, tmp_path, **arguments))
        return drivers[-1]

    yield open_
    for driver in drivers:
        driver.close()
