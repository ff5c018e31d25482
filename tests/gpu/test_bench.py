"""The GPU benchmark: its lower bounds against figures computed by hand, and its behaviour if a part
fails.
"""

from __future__ import annotations

import argparse

import pytest
from quire.kernels.registry import CONTRACTS
from quire.tests.bench import timing
from quire.tests.bench.bench_gpu import Bench


def bench(**arguments) -> Bench:
    return Bench(
        argparse.Namespace(
            **{
                "device": "cpu",
                "models": ["tiny"],
                "skip": [],
                "seconds": 0.01,
                "out": None,
                **arguments,
            }
        )
    )


@pytest.mark.parametrize(
    ("model", "tokens", "context", "is_prefill", "ms"),
    [
        ("0.5B", 1, 1024, False, 0.233),
        ("0.5B", 256, 1024, False, 1.069),
        ("0.6B", 64, 1024, False, 2.025),
        ("1.5B", 64, 1024, False, 1.155),
        ("7B", 1, 1024, False, 3.302),
        ("7B", 64, 1024, False, 4.162),
        ("7B", 8192, 0, True, 152),
        ("0.5B", 8192, 0, True, 11.1),
        ("Qwen3.5-0.8B", 1, 1024, False, 0.362),
        ("LFM2-1.2B", 1, 1024, False, 0.547),
    ],
)
def test_floors_at_4_3_terabytes_and_790_teraflops(model, tokens, context, is_prefill, ms) -> None:
    counted = bench()
    counted.limits = {"bytes": 4.3e12, "flops": 790e12}
    assert 1e3 * counted.floor_s(model, tokens, context, is_prefill) == pytest.approx(ms, rel=0.02)


NOT_TIMED = {
    "paged_attention",  # Bench.attention
    # at load time; the function that pack_linear returns is timed
    "pack_linear",
    "pack_quantized_linear",
    "pack_gguf_linear",
    "random_gumbel",  # within sample_tokens
    # of experts only the products are timed
    "route_experts",
    "expert_outputs",
    "weighted_sum",
    "count_experts",
    "add_gated",
    "scale_by_expert",
    # nor layers with states or latents, nor what stands beside them
    "short_conv",
    "gated_delta_rule",
    "selective_scan",
    "gated_rms_norm",
    "multiply",
    "relu_squared",
    "soft_cap",
    # nor several streams, nor sparse activations
    "stack_streams",
    "match_magnitude",
    "altup_predict",
    "altup_correct",
    "gaussian_top_k",
    "latent_attention",
    "store_latents",
    "pack_head_linear",
    "rotary_embedding_interleaved",
    # nor reads images
    "replace_rows",
    "add_rows",
    "clamp",
    "rotary_embedding_by_component",
    # nor is it an encoder: Bench.encoder has these together
    "layer_norm",
    "fused_add_layer_norm",
    "gelu",
    "gelu_tanh",
    "silu",
    "relu",
    "gelu_and_mul",
    "encoder_attention",
    "write_runs",
    # adapters are refused on a GPU
    "add_lora",
    "add_lora_embedding",
    "spread_logits",  # of heads that draft
    "gather_sampling_parameters",  # when requests enter
}


def test_every_kernel_is_timed() -> None:
    dry = bench()
    dry.kernels("tiny")
    timed = {name.split()[2].rstrip(",") for name in dry.found}
    assert timed - {"linear"} | NOT_TIMED == set(CONTRACTS)
    assert all(numbers["of_the_limit"] > 0 for numbers in dry.found.values())


@pytest.mark.slow
def test_a_failing_part_does_not_end_the_others(capsys) -> None:
    def broken(model: str) -> None:
        raise ZeroDivisionError("a bug")

    dry = bench(skip=["workload", "kernels", "encoders"])
    dry.steps, dry.peers = broken, lambda model: dry.record("peers")
    dry.run()
    assert (
        '"failed": "ZeroDivisionError: a bug"' in capsys.readouterr().out and "peers" in dry.found
    )


def test_what_a_graph_reads_before_a_call_is_not_the_calls_time(monkeypatch) -> None:
    """The clock of a GPU that is not there: 30 us for the reading, 5 us for the call."""
    clock: list[float] = []
    graphs: list[list[float]] = []

    class Capture:
        def __init__(self, graph: object) -> None: ...

        def __enter__(self) -> None:
            clock.clear()

        def __exit__(self, *error: object) -> None:
            graphs.append([*clock])

    monkeypatch.setattr(timing, "CACHED", 16384)
    monkeypatch.setattr(timing.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing.torch.cuda, "CUDAGraph", lambda: argparse.Namespace(replay=None))
    monkeypatch.setattr(timing.torch.cuda, "graph", Capture)
    monkeypatch.setattr(timing, "gpu_seconds", lambda replay: sum(graphs[-1]))
    monkeypatch.setattr(timing.GraphTimer, "_read", lambda self: clock.append(30e-6))
    timer = timing.GraphTimer("cpu")
    assert timer.seconds(lambda: clock.append(5e-6)) == pytest.approx(5e-6)
    assert [len(graph) for graph in graphs] == [timing.CALLS, 2 * timing.CALLS]
