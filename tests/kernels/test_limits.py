"""The machine's measured limits: positive, the fastest of several runs, number of threads
unchanged.
"""

import time

import pytest
import torch
from quire.kernels.cpu import limits


def test_limits_are_positive_and_threads_stay(monkeypatch):
    monkeypatch.setattr(limits, "GEMM_SHAPES", ((4, 32, 48),))
    before = torch.get_num_threads()
    assert limits.read_bandwidth(2**16, 1, 0.001) > 0
    assert all(
        limits.gemm_flops(dtype, 0.001) > 0 for dtype in (torch.float32, torch.bfloat16, torch.int8)
    )
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("durations", "seconds", "best"), [([9, 2, 1, 5], 7, 1), ([9, 4, 1], 3, 4)]
)
def test_the_first_run_is_not_timed_and_one_is(monkeypatch, durations, seconds, best):
    now, runs = 0.0, iter(durations)

    def run() -> None:
        nonlocal now
        now += next(runs)

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert limits._shortest(run, seconds) == best


def test_measurements_alternate(monkeypatch):
    monkeypatch.setattr(limits, "GEMM_SHAPES", ((4, 32, 48),))
    for meter in (limits.Reader(2**16), limits.Multiplier([torch.float32, torch.int8], 0.001)):
        rates = meter.rates(3)
        assert len(rates) == 3 and min(rates) > 0


def test_a_multiplier_has_the_fastest_product(monkeypatch):
    products = {
        "slow": (torch.ones(2, 3), 5, lambda x: time.sleep(0.02)),
        "fast": (torch.ones(2, 3), 5, lambda x: None),
    }
    monkeypatch.setattr(limits, "_products", lambda name: [products[name]])
    assert limits.Multiplier(["slow", "fast"], 0.001)._multiply is products["fast"][2]
