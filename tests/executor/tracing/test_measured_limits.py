"""The machine's limits are measured once."""

import torch
from quire.executor.tracing import measured_limits as module
from quire.executor.tracing.measured_limits import measured_limits


def test_limits_are_measured_once_per_kind(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 1e-3)
    measured_limits.cache_clear()
    cpu = torch.device("cpu")
    first = measured_limits(cpu, torch.float32, None, 1000, 1, False)
    assert first.bytes_per_s > 1e8 and first.flops > 1e8 and first.int8_ops == first.flops
    assert measured_limits(cpu, torch.float32, None, 1000, 1, False) is first
    assert first.fp32_flops == 0
    assert measured_limits(cpu, torch.float32, None, 1000, 1, True).fp32_flops > 1e8
    measured_limits.cache_clear()
