"""device="auto": a GPU that has room, otherwise the CPU, and the log says why."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from quire import EngineArgs
from quire.frontend.model_info import choose_device as choosing
from quire.ipc.errors import InvalidParameterError

GIB = 2**30
SIZES: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}


def chosen(monkeypatch: pytest.MonkeyPatch, free: int, cuda: bool = True, **given: Any) -> str:
    """The device of the bundled model, where a GPU of 8 GiB has so many free bytes."""
    monkeypatch.setattr(choosing, "gpu_memory_bytes", lambda: (free, 8 * GIB))
    monkeypatch.setattr(choosing, "torch_has_cuda", lambda: cuda)
    return EngineArgs("bundled", **SIZES | given).create_engine_config().device_config.device


@pytest.mark.parametrize(
    ("free", "given", "device", "reason"),
    [
        (8 * GIB, {}, "cuda", "GiB are needed, 7.2 GiB of the GPU are free"),
        # another engine has the rest of what gpu_memory_utilization allows
        (GIB // 2, {}, "cpu", "0.0 GiB of the GPU are free"),
        (2 * GIB, {"max_model_len": 10**6, "hf_overrides": {"max_position_embeddings": 10**6}})
        + ("cpu", "GiB are needed, 1.2 GiB"),
        (8 * GIB, {"cuda": False}, "cpu", "PyTorch is built without CUDA"),
        (8 * GIB, {"tensor_parallel_size": 2}, "cpu", "several ranks"),
        (8 * GIB, {"quantization": "int8"}, "cpu", "quantization=int8 runs on a GPU with"),
        (8 * GIB, {"device": "cpu"}, "cpu", ""),
    ],
)
def test_a_gpu_that_has_room(free, given, device, reason, monkeypatch, caplog) -> None:
    with caplog.at_level(logging.INFO, choosing.__name__):
        assert chosen(monkeypatch, free, **given) == device
    told = [record.message for record in caplog.records if record.name == choosing.__name__]
    assert reason in "".join(told) and len(told) == bool(reason)


def test_without_a_gpu(monkeypatch) -> None:
    def none() -> tuple[int, int]:
        raise InvalidParameterError("device", "there is no GPU")

    monkeypatch.setattr(choosing, "gpu_memory_bytes", none)
    config = EngineArgs("bundled").create_engine_config()
    assert config.device_config.device == "cpu"
