"""The GPU's memory from a driver that is missing, that fails, and that answers."""

from __future__ import annotations

import ctypes

import pytest
from quire.frontend.model_info import gpu_memory
from quire.ipc.errors import InvalidParameterError


class Driver:
    """Stands in for libcuda: 79 of 80 bytes are free. `failing` is the function that returns error
    100.
    """

    def __init__(self, failing: str = ""):
        self.failing, self.calls = failing, []

    def __getattr__(self, name: str):
        def call(*args) -> int:
            self.calls.append(name)
            if name == "cuMemGetInfo_v2":
                args[0]._obj.value, args[1]._obj.value = 79, 80
            return 100 if name == self.failing else 0

        return call


def use(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)


def test_free_and_all(monkeypatch):
    driver = Driver()
    use(driver, monkeypatch)
    assert gpu_memory.gpu_memory_bytes() == (79, 80)
    assert driver.calls[-2:] == ["cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]


@pytest.mark.parametrize(
    "failing",
    ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuMemGetInfo_v2"],
)
def test_an_error_of_the_driver_is_one_sentence(failing, monkeypatch):
    driver = Driver(failing)
    use(driver, monkeypatch)
    with pytest.raises(
        InvalidParameterError,
        match=r"device: cuda: the memory .* error 100\); name an amount",
    ):
        gpu_memory.gpu_memory_bytes()
    assert ("cuDevicePrimaryCtxRetain" in driver.calls[:-1]) == (
        "cuDevicePrimaryCtxRelease_v2" in driver.calls
    )


def test_no_driver(monkeypatch):
    monkeypatch.setattr(gpu_memory, "CUDA_LIBRARY", "libnothing.so.1")
    with pytest.raises(
        InvalidParameterError,
        match=r"device: cuda: the memory .*libnothing.so.1 was not found",
    ):
        gpu_memory.gpu_memory_bytes()
