"""Equal layers fold into one entry, compared with the machine's limits."""

import pytest
from quire.frontend.trace.fold import dominating, fold, folded_module, kernels_of
from quire.ipc.trace import Kernel, MachineLimits
from quire.tests.frontend.trace.made import made


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("layers.3.mlp.down_proj", "layers[i].mlp.down_proj"),
        ("model.layers.12", "model.layers[i]"),
        ("experts.0.layers.11.w2", "experts[i].layers[i].w2"),
        ("lm_head", "lm_head"),
        ("layer4.norm2", "layer4.norm2"),
    ],
)
def test_indices_become_i(module, expected):
    assert folded_module(module) == expected


def test_equal_layers_are_one_entry():
    trace = made()
    step = trace.steps[0]
    entries = fold(kernels_of(step), trace.recorded.limits)
    assert [(entry.module, entry.count) for entry in entries] == [
        ("layers[i].self_attn.qkv_proj", 2),
        ("layers[i].self_attn", 2),
        ("layers[i].mlp.down_proj", 2),
    ]
    qkv, attention, down = entries
    assert min(qkv.seconds) == pytest.approx(10e-6) and max(qkv.seconds) == pytest.approx(11e-6)
    assert qkv.median_s == pytest.approx(10.5e-6) and qkv.total_s == pytest.approx(21e-6)
    assert down.bytes_per_s == pytest.approx(81_000 / 20e-6)
    assert dominating(entries) is down and dominating([]) is None
    # all kernels of all steps, since shapes differ between the steps
    assert sum(entry.count for entry in trace.kernels()) == 12 and len(trace.kernels()) == 6


def test_the_limit_is_what_takes_longer():
    def entry(num_bytes: int, flops: int, op: str = "linear"):
        kernel = Kernel("", op, "native", "", "", 0.0, 1e-3, num_bytes, 0, flops)
        return fold([kernel], MachineLimits(1e9, 1e12, 4e12, 5e11))[0]

    assert (entry(500_000, 0).bound, entry(500_000, 0).fraction) == ("memory", pytest.approx(0.5))
    assert entry(1, 10**9).bound == "arithmetic" and entry(1, 10**9).fraction == pytest.approx(1)
    assert entry(1, 10**9, "linear_int8").fraction == pytest.approx(0.25)
    assert entry(1, 10**8, "gated_delta_rule").fraction == pytest.approx(0.2)
    assert entry(0, 0).fraction == 0


def test_unknown_limits_and_times():
    kernel = Kernel("", "add", "x", "", "", 0.0, 0.0, 10, 10, 10)
    [entry] = fold([kernel], MachineLimits())
    assert entry.fraction == entry.bytes_per_s == entry.flops_per_s == 0
