"""An engine's part of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from quire.core.engine_proc import VISIBLE_GPUS, take_share
from quire.ipc.config import DeviceConfig
from quire.ipc.errors import InvalidParameterError


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE_GPUS, "4,5,6,7")
    take_share(DeviceConfig(device="cuda"))  # the only engine has all
    assert os.environ[VISIBLE_GPUS] == "4,5,6,7"
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2, "device": "cuda"}
    with pytest.raises(InvalidParameterError, match="data_parallel_size: .* engine 2"):
        take_share(DeviceConfig(**sizes, data_parallel_rank=2))
    take_share(DeviceConfig(**sizes, data_parallel_rank=1))
    assert os.environ[VISIBLE_GPUS] == "6,7"


def test_cores() -> None:
    code = (
        "import os; from quire.ipc.config import DeviceConfig\n"
        "from quire.core.engine_proc import take_share\n"
        "core = min(os.sched_getaffinity(0)); take_share(DeviceConfig(cores=[core]))\n"
        "print(os.sched_getaffinity(0) == {core})"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\n"
