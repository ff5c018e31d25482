"""Traced steps of tiny models: the same bits, all weights once, and kernels that fill the time."""

from __future__ import annotations

import time

import pytest
from quire.executor.worker import Worker
from quire.ipc.step_messages import SchedulerOutput
from quire.ipc.trace import RanksTrace, RankTrace
from quire.kernels.cpu.native.library import library
from quire.tests.executor.driver import Driver, greedy, start_executor

PROMPTS = [[1, 2, 3, 4, 5], [7, 8]]
native = pytest.mark.skipif(library is None, reason="the native library is not built")


def run(executor: Worker, num_steps: int) -> list[list[int]]:
    driver = Driver(executor)
    rows = [driver.add(f"r{i}", prompt, greedy(logprobs=2)) for i, prompt in enumerate(PROMPTS)]
    for _ in range(num_steps):
        driver.step({row.request_id: row.num_tokens - row.num_computed for row in rows})
    found = [
        (row.output, [[part.tolist() for part in one[:2]] for one in row.logprobs]) for row in rows
    ]
    slots = [row.slot for row in rows]
    executor.execute_model(SchedulerOutput(0, [], [], [], [], freed_slots=slots))
    return found


def traced(executor: Worker, num_steps: int = 3) -> tuple[list, RanksTrace]:
    executor.start_trace(num_steps)
    answers = run(executor, num_steps)
    return answers, executor.end_trace()


def ranks(trace: RanksTrace) -> list[RankTrace]:
    return [rank for one in trace.steps.values() for rank in one]


@pytest.mark.parametrize("isa", [pytest.param("auto", marks=native), "none"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "granite"])
def test_a_traced_step_gives_the_same_bits(tiny, kind, isa):
    executor = start_executor(tiny(kind), cpu_isa=isa)
    plain = run(executor, 3)
    answers, trace = traced(executor)
    assert answers == plain == run(executor, 3)
    assert len(trace.steps) == 3 and all(rank.kernels for rank in ranks(trace))


@native
def test_the_program_is_the_same_object_afterwards(tiny):
    executor = start_executor(tiny())
    runner = executor.runner
    before, attributes = runner.program, {name: id(value) for name, value in vars(runner).items()}
    layer = runner.model.layers[0]
    of_layer = dict(vars(layer.self_attn)), dict(vars(layer.mlp))
    traced(executor)
    assert runner.program is before and before.timer is None
    assert {name: id(value) for name, value in vars(runner).items()} == attributes
    assert (vars(layer.self_attn), vars(layer.mlp)) == of_layer
    assert executor.tracer is None


@pytest.mark.parametrize("isa", [pytest.param("auto", marks=native), "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_is_counted_once(tiny, isa, dtype):
    executor = start_executor(tiny("llama"), cpu_isa=isa, dtype=dtype)
    model, (_, trace) = executor.model, traced(executor)
    size = {"float32": 4, "bfloat16": 2}[dtype]
    config = model.config
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    of_layer = config.hidden_size * (
        heads + config.num_attention_heads * config.head_dim + 3 * config.intermediate_size + 2
    )
    expected = config.num_hidden_layers * of_layer + config.hidden_size * (config.vocab_size + 1)
    for rank in ranks(trace):
        counted = sum(kernel.weight_bytes for kernel in rank.kernels)
        # packed weights are padded to panels of 16 outputs
        assert size * expected <= counted <= size * expected * 1.1


@pytest.mark.parametrize("isa", [pytest.param("auto", marks=native), "none"])
def test_the_experts_that_are_read_are_counted_once(tiny, isa):
    executor = start_executor(tiny("mixtral"), cpu_isa=isa)
    plain = run(executor, 3)
    answers, trace = traced(executor)
    assert answers == plain
    config = executor.model.config
    expert_bytes = 4 * 3 * config.hidden_size * config.experts.size
    for rank, num_tokens in zip(ranks(trace), (7, 2, 2), strict=True):
        assert list(rank.experts) == list(range(config.num_hidden_layers))
        for layer, rows in rank.experts.items():
            assert sum(rows) == num_tokens * config.experts.per_token
            of_experts = [
                kernel.weight_bytes
                for kernel in rank.kernels
                if kernel.module.startswith(f"layers.{layer}.")
                and (kernel.op == "fused_moe" or kernel.op.startswith("experts_linear"))
            ]
            read = len(rows) - rows.count(0)
            if isa == "none":
                assert sum(of_experts) == read * expert_bytes
            else:  # which experts each call has read is not kept
                assert read * expert_bytes <= sum(of_experts) <= len(rows) * expert_bytes


@native
def test_kernels_are_those_of_the_model_in_order(tiny):
    executor = start_executor(tiny("qwen2"))
    _, trace = traced(executor)
    [first, *_] = ranks(trace)
    names = [(kernel.module, kernel.op) for kernel in first.kernels]
    assert names[:5] == [
        ("embed_tokens", names[0][1]),
        ("layers.0.input_layernorm", "rms_norm"),
        ("layers.0.self_attn.qkv_proj", "linear"),
        ("layers.0.self_attn", "rotary_and_write_kv"),
        ("layers.0.self_attn", "attention"),
    ]
    config = executor.model.config
    gate = next(one for one in first.kernels if one.module == "layers.1.mlp.gate_up_proj")
    columns, rows, tokens = config.hidden_size, 2 * config.intermediate_size, 7
    assert gate.shape == f"[{tokens}, {columns}] · [{rows}, {columns}]ᵀ"
    assert gate.flops == 2 * tokens * columns * rows
    assert gate.place.startswith("executor/models/blocks.py:")
    assert gate.implementation_place.startswith("kernels/cpu/native/linear.py:")
    head = next(one for one in first.kernels if one.module == "lm_head")
    assert head.shape.startswith("[2, ") and head.dtype == "float32"
    assert [(one.name, one.shape) for one in first.inputs][:2] == [
        ("token_ids", [7]),
        ("positions", [7]),
    ]
    assert [span.name for span in first.spans] == ["inputs", "model", "sampler"]
    begins = [kernel.begin_s for kernel in first.kernels]
    assert begins == sorted(begins) and first.begin_s <= begins[0]
    assert trace.limits.bytes_per_s > 0 and trace.limits.flops > 0
    assert trace.places["ModelRunner.execute_model"].startswith("executor/runner/model_runner.py:")


@native
def test_kernels_fill_the_time_of_the_model(tiny):
    executor = start_executor(tiny("llama", hidden_size=256, intermediate_size=2048))
    assert best_share(executor) >= 0.85


def best_share(executor: Worker) -> float:
    """The largest share of the model's time in a step that its kernels fill, of several tries: a
    busy machine takes the core away now and then.
    """
    shares = []
    while len(shares) < 20 and max(shares, default=0.0) < 0.85:
        for rank in ranks(traced(executor, 4)[1]):
            model = next(span for span in rank.spans if span.name == "model")
            end_s = model.begin_s + model.seconds
            inside = [one for one in rank.kernels if model.begin_s <= one.begin_s <= end_s]
            shares.append(sum(kernel.seconds for kernel in inside) / model.seconds)
    assert max(shares) <= 1, shares
    return max(shares)


def test_the_fallback_names_transformers_modules(tiny):
    executor = start_executor(tiny("llama"), model_impl="transformers")
    plain = run(executor, 2)
    answers, trace = traced(executor, 2)
    assert answers == plain
    rank = ranks(trace)[0]
    modules = {kernel.module for kernel in rank.kernels}
    assert "model.layers.1.self_attn.o_proj" in modules and "lm_head" in modules
    assert {"linear", "paged_attention"} <= {kernel.op for kernel in rank.kernels}
    assert "transformers" in {kernel.implementation for kernel in rank.kernels}
    # every module's own time is counted, so that together they are the model's
    assert best_share(executor) >= 0.85
    hooks = [module._forward_hooks for module in executor.model._model.modules()]
    assert not any(hooks)


def test_steps_beyond_the_asked_ones_are_not_recorded(tiny):
    executor = start_executor(tiny())
    executor.start_trace(2)
    run(executor, 4)
    assert len(executor.end_trace().steps) == 2
    assert executor.end_trace() == RanksTrace()


def test_sleep_ends_the_recording(tiny):
    executor = start_executor(tiny())
    executor.start_trace(8)
    run(executor, 2)
    executor.sleep(["kv_cache"])
    executor.wake_up(["kv_cache"])
    run(executor, 2)
    assert len(executor.end_trace().steps) == 2


def test_times_are_of_the_clock_of_all_processes(tiny):
    executor = start_executor(tiny())
    before = time.monotonic()
    _, trace = traced(executor)
    for rank in ranks(trace):
        for kernel in rank.kernels:
            assert before <= kernel.begin_s <= time.monotonic()
            assert all(begin <= end for _, begin, end in kernel.threads)


@native
def test_layers_that_compute_only_some_rows_are_traced_as_such(tiny):
    executor = start_executor(tiny("gemma4_text"), dtype="bfloat16")
    plain = run(executor, 2)
    answers, trace = traced(executor, 2)
    assert answers == plain
    prompts, _ = ranks(trace)
    shapes = {kernel.module: kernel.shape for kernel in prompts.kernels}
    assert [shapes[f"layers.{i}.self_attn.o_proj"][:7] for i in (3, 4)] == ["[7, 128", "[2, 64]"]
