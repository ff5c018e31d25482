"""A trace made by hand: a prompt and a decode of a model of two layers."""

from __future__ import annotations

from quire.frontend.trace.recorded import Received
from quire.frontend.trace.trace import Trace
from quire.ipc.trace import (
    EngineTrace,
    Hop,
    Input,
    Kernel,
    MachineLimits,
    RankTrace,
    Row,
    Span,
    StepTrace,
    Waiting,
)

MICROSECOND = 1e-6


def kernels(begin_s: float, num_tokens: int, slowness: float = 1.0) -> list[Kernel]:
    found, now = [], begin_s
    for layer in range(2):
        for name, op, weight_bytes, us in (
            ("self_attn.qkv_proj", "linear", 40_000, 10 + layer),
            ("self_attn", "attention", 0, 2),
            ("mlp.down_proj", "linear", 80_000, 20),
        ):
            seconds = us * MICROSECOND * slowness
            found.append(
                Kernel(
                    f"layers.{layer}.{name}",
                    op,
                    "native avx2",
                    f"[{num_tokens}, 64]",
                    "bfloat16",
                    now,
                    seconds,
                    weight_bytes,
                    1000,
                    weight_bytes * num_tokens,
                    "executor/models/blocks.py:7",
                    "kernels/cpu/native/linear.py:8",
                    [(0, now, now + seconds), (1, now, now + seconds / 2)],
                )
            )
            now += seconds
    return found


def made(slowness: float = 1.0) -> Trace:
    steps = []
    for number, num_tokens in ((3, 4), (4, 1)):
        begin_s = float(number)
        found = kernels(begin_s + 1e-3, num_tokens, slowness)
        busy_s = sum(kernel.seconds for kernel in found)
        rank = RankTrace(
            begin_s + 5e-4,
            busy_s * 1.25,
            [Input("token_ids", [num_tokens], "int32")],
            [
                Span("inputs", begin_s + 6e-4, 1e-4, "executor/runner/step_inputs.py:5"),
                Span("model", begin_s + 1e-3, busy_s, "executor/runner/model_runner.py:5"),
                Span("sampler", begin_s + 1e-3 + busy_s, 2e-5, "executor/runner/model_runner.py:9"),
            ],
            found,
        )
        steps.append(
            StepTrace(
                number,
                begin_s,
                4e-4,
                begin_s + 5e-4,
                busy_s * 1.25,
                1e-4,
                64,
                [Row("a", num_tokens, 0 if num_tokens > 1 else 4, 0, 4, num_tokens > 1, 1, 0)],
                [Waiting("b", "blocks", 90, 0), Waiting("c", "order", 5, 0)],
                [],
                ["a"] if number == 4 else [],
                [9, 8, 9],
                1,
                [rank],
            )
        )
    return Trace(
        EngineTrace(
            "/models/tiny",
            "bfloat16",
            "cpu",
            2,
            "avx2",
            "TinyForCausalLM",
            77,
            steps,
            MachineLimits(1e10, 1e12, 2e12),
            {
                "EngineCore._step": "core/engine_core.py:1",
                "Scheduler.schedule": "core/scheduling/scheduler.py:2",
                "Scheduler.update_from_output": "core/scheduling/scheduler.py:3",
                "Worker.execute_model": "executor/worker.py:5",
                "ModelRunner.execute_model": "executor/runner/model_runner.py:6",
            },
            ["traced steps run without CUDA graphs"],
            hops=[
                Hop("a", 300, 2.998, 2.998, 2e-4, 2.9985, 1e-4, 2.999),
                Hop("", 120, 4.4, 4.4001, 1e-4, 4.49, 2e-4, 4.5),
            ],
        ),
        [Received(4.5, 1e-4, 1, {"a": "fox"})],
        {
            "LLM.generate": "frontend/llm.py:1",
            "LLMEngine.step": "frontend/llm_engine.py:2",
            "OutputProcessor.process_outputs": "frontend/requests/output_processor.py:3",
            "IncrementalDetokenizer.update": "frontend/text/detokenizer.py:4",
        },
    )
