"""A model's step as one native call: when it is recorded and recorded again, what is logged if it
cannot be, and the same bits as operation by operation.
"""

from __future__ import annotations

import logging
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from quire.executor.model import TextEncoder
from quire.executor.models import ModelKind
from quire.executor.models.decoder import Decoder
from quire.executor.models.layers import RMSNorm
from quire.executor.program.step_program import OPERATIONS, OpByOp, record_step
from quire.executor.worker import Worker
from quire.ipc.models.architectures import ARCHITECTURES
from quire.ipc.params import SamplingParams
from quire.kernels import registry
from quire.kernels.cpu.native.recorder import Limits
from quire.tests.executor.driver import Row, generate, greedy, start_executor
from quire.tests.executor.on_device import use_forward
from quire.tests.kernels.encoder_cases import encoder_metadata

is_native = all(
    "native" in {found.name for found in registry.implementations(op)} for op in OPERATIONS
)
needs_native = pytest.mark.skipif(not is_native, reason="the native library is not built")
PROMPTS = [[5], list(range(40)), [7, 8, 9] * 5, list(range(200, 217))]
MODELS = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {"mlp_bias": True, "intermediate_size": 100}),
    "gemma3": ("gemma3_text", {}),
    "phi3": ("phi3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}),
    "smollm3": ("smollm3", {}),
    "olmo3": ("olmo3", {}),
    "granite": ("granite", {}),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.3,
            }
        },
    ),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}


@pytest.fixture
def logged(caplog):
    """logged() returns the worker's log lines about recording."""
    caplog.set_level(logging.INFO, logger="quire.executor.program.step_program")
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name == "quire.executor.program.step_program"
    ]


def run_randomly(executor: Worker, seed: int) -> list[Row]:
    """Run greedy and sampled requests with log-probabilities of prompt and output. Their prompts
    are chunked at random.
    """
    chance = random.Random(seed)
    prompts = [
        [chance.randrange(300) for _ in range(chance.choice((1, 3, 16, 40, 70)))] for _ in range(7)
    ]
    params = SamplingParams(
        temperature=chance.choice((0.0, 0.8)), seed=seed, logprobs=3, prompt_logprobs=2
    )
    return generate(executor, prompts, 9, params, chunk=lambda row: chance.choice((1, 5, 70)))


def assert_same_bits(rows: list[Row], others: list[Row]) -> None:
    for row, other in zip(rows, others, strict=True):
        assert row.error is None and row.output == other.output and len(row.output) == 9
        assert row.prompt_logprobs.keys() == other.prompt_logprobs.keys()
        for mine, theirs in zip(
            [*row.logprobs, *row.prompt_logprobs.values()],
            [*other.logprobs, *other.prompt_logprobs.values()],
            strict=True,
        ):
            assert (
                mine[0].tolist() == theirs[0].tolist()
                and mine[1].tobytes() == theirs[1].tobytes()
                and mine[2] == theirs[2]
            )


@pytest.mark.sampled
@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_one_call_gives_the_bits_of_single_operations(model, dtype, tiny, logged):
    kind, overrides = MODELS[model]
    executor = start_executor(tiny(kind, **overrides), dtype=dtype, max_num_batched_tokens=512)
    assert executor.runner.program is not None, logged()
    recorded = [run_randomly(executor, seed) for seed in range(3)]
    use_forward(executor, None)
    for seed, rows in enumerate(recorded):
        assert_same_bits(rows, run_randomly(executor, seed))


@needs_native
def test_engines_do_not_share_buffers(tiny):
    """Two engines of different shapes step in turn."""
    first, second = (
        start_executor(tiny("qwen2")),
        start_executor(tiny("qwen3", tie_word_embeddings=True), dtype="bfloat16"),
    )
    alone = [run_randomly(executor, 1) for executor in (first, second)]
    turns = [run_randomly(executor, seed) for seed in (1, 2) for executor in (first, second)]
    for rows, others in zip(alone, turns[:2], strict=True):
        assert_same_bits(rows, others)


@needs_native
def test_a_program_is_recorded_again_if_weights_or_cache_move(tiny):
    executor = start_executor(tiny("qwen2"))
    worker, made = executor, []
    expected = run_randomly(executor, 0)

    def program_is_new() -> None:
        assert worker.runner.program is not None and worker.runner.program not in made
        made.append(worker.runner.program)

    program_is_new()
    worker.sleep(["kv_cache"])
    with pytest.raises(RuntimeError, match="sleeps"):
        worker.check_health()
    worker.wake_up(["kv_cache"])
    program_is_new()
    assert_same_bits(run_randomly(executor, 0), expected)
    worker.sleep(["weights", "kv_cache"])
    worker.wake_up(["weights", "kv_cache"])
    program_is_new()
    assert_same_bits(run_randomly(executor, 0), expected)
    worker.load_weights(str(tiny("qwen2", seed=1)))
    program_is_new()
    others = run_randomly(executor, 0)
    assert_same_bits(others, run_randomly(start_executor(tiny("qwen2", seed=1)), 0))
    assert [row.output for row in others] != [row.output for row in expected]
    worker.sleep(["kv_cache"])
    # while there is no cache; recorded when the cache is back
    worker.load_weights(str(tiny("qwen2")))
    worker.wake_up(["kv_cache"])
    program_is_new()
    assert_same_bits(run_randomly(executor, 0), expected)


@needs_native
def test_a_step_beyond_the_limits_is_refused(tiny):
    executor = start_executor(tiny("qwen2"), max_num_batched_tokens=32)
    with pytest.raises(
        ValueError,
        match="larger than the one that was recorded: num_tokens is 40, but must be at most 32",
    ):
        generate(executor, [list(range(40))], 1)


# ------------------------------------------------------------ operation by operation


def outputs(executor: Worker) -> list[list[int]]:
    return [row.output for row in generate(executor, PROMPTS, 8, greedy())]


@needs_native
@pytest.mark.parametrize("op", ["rms_norm", "paged_attention", "pack_linear", "embedding"])
def test_a_mixed_table_runs_op_by_op_and_logs_it(op, tiny, logged):
    expected = outputs(start_executor(tiny("qwen2")))
    executor = start_executor(tiny("qwen2"), kernels={op: "cpu"})
    assert executor.runner.program is None
    assert logged()[-1].endswith(f"since not all are native: {op}=cpu")
    assert outputs(executor) == expected


@needs_native
def test_a_decoder_needs_no_attention_of_encoders(tiny, logged):
    executor = start_executor(tiny("qwen2"), kernels={"encoder_attention": "cpu"})
    assert executor.runner.program is not None
    assert not any("operation by operation" in line for line in logged())


@pytest.mark.parametrize(
    "arguments", [{"cpu_isa": "none"}, {"kernels": dict.fromkeys(OPERATIONS, "reference")}], ids=str
)
def test_without_native_kernels_it_runs_op_by_op(arguments, tiny, logged):
    executor = start_executor(tiny("qwen2"), **arguments)
    assert executor.runner.program is None
    assert logged() == ["the model runs operation by operation: there are no native kernels for it"]
    assert all(len(output) == 8 for output in outputs(executor))


QWEN2 = ARCHITECTURES["Qwen2ForCausalLM"]


class Doubled(Decoder):
    """A user's model that computes with torch between its layers."""

    def __call__(self, token_ids, positions, metadata):
        return super().__call__(token_ids, positions, metadata) * 2


class Numpy(Decoder):
    """A user's model that computes outside torch."""

    def __call__(self, token_ids, positions, metadata):
        hidden = super().__call__(token_ids, positions, metadata)
        if hidden.numpy().any():
            np.negative(hidden.numpy(), out=hidden.numpy())
        return hidden


class Branching(Decoder):
    """A user's model that branches on the size of the step."""

    def __call__(self, token_ids, positions, metadata):
        hidden = super().__call__(token_ids, positions, metadata)
        if len(token_ids) < 100:
            self.norm.add(hidden, hidden)
        return hidden


class Failing(Decoder):
    """A user's model that fails on a step that is not real."""

    def __call__(self, token_ids, positions, metadata):
        if len(token_ids) > 100:
            raise IndexError("so many tokens")
        return super().__call__(token_ids, positions, metadata)


@needs_native
@pytest.mark.parametrize(
    ("model_class", "reason"),
    [
        (Doubled, "cannot be recorded: aten.mul.Tensor is none of the native kernels"),
        (
            Numpy,
            "cannot be recorded: the record gives other hidden states than the model's own code",
        ),
        (
            Branching,
            "cannot be recorded: the record gives other hidden states than the model's own code",
        ),
        (Failing, "cannot be recorded: IndexError: so many tokens"),
    ],
)
def test_a_model_that_cannot_be_recorded_runs_op_by_op(
    model_class, reason, tiny, logged, monkeypatch
):
    kind = ModelKind(model_class.__name__, QWEN2.parse, partial(model_class.of_row, QWEN2))
    monkeypatch.setattr("quire.executor.model_builder.find_model", lambda *_: kind)
    executor = start_executor(tiny("qwen2"))
    assert executor.runner.program is None
    assert logged()[-1].endswith(reason)
    assert all(len(output) == 8 for output in outputs(executor))


@needs_native
def test_a_users_layer_works(tiny, logged, monkeypatch):
    """The layer replaces one of Quire's in the middle of the stack."""

    class Norm(RMSNorm):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight

    expected = outputs(start_executor(tiny("qwen3")))
    monkeypatch.setattr("quire.executor.models.layers.RMSNorm", Norm)
    executor = start_executor(tiny("qwen3"))
    assert (
        executor.runner.program is None
        and "aten.square.default is none of the native kernels" in logged()[-1]
    )
    assert outputs(executor) == expected


# ------------------------------------------------------------ a text encoder


class Encoder(TextEncoder):
    """A layer of a text encoder with everything that such models are made of."""

    num_token_types = 2
    config = SimpleNamespace(vocab_size=50)
    heads, head_dim = 4, 8

    def __init__(self, ops: registry.OpTable, dtype: torch.dtype, bits: int | None):
        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape) / 4).to(dtype)

        def linear(columns_out: int, columns_in: int):
            weights = random(columns_out, columns_in), random(columns_out)
            if bits is None:
                return ops.pack_linear(*weights)
            return ops.pack_quantized_linear(*weights, bits)

        size = self.heads * self.head_dim
        self.ops = ops
        self.tables = random(50, size), random(64, size), random(2, size)
        self.norms = [(random(size), bias) for bias in (random(size), None, random(size))]
        self.qkv, self.out = linear(3 * size, size), linear(size, size)
        self.up, self.gate_up = linear(64, size), linear(2 * size, 64)
        self.bias = torch.randn(self.heads, 21)

    def __call__(self, token_ids, positions, metadata, token_types):
        ops, first = self.ops, self.norms[0]
        words, places, types = self.tables
        x = ops.embedding(token_ids, words)
        ops.add(ops.embedding(positions, places), x)
        ops.add(ops.embedding(token_types, types), x)
        x = ops.layer_norm(x, *first, 1e-12)
        for window, bias in ((0, None), (3, self.bias)):
            heads = self.qkv(x).view(len(x), 3 * self.heads, self.head_dim)
            query, key, value = heads.split(self.heads, dim=1)
            attended = ops.encoder_attention(query, key, value, metadata, 0.3, window, bias)
            y = self.out(attended.flatten(1))
            ops.fused_add_layer_norm(y, x, *self.norms[1], 1e-5)
            inner = ops.relu(ops.silu(ops.gelu_tanh(ops.gelu(self.up(y)))))
            x = ops.gelu_and_mul(self.gate_up(inner))
            ops.fused_add_layer_norm(x, y, *self.norms[2], 1e-5)
        return x


def texts(lengths: list[int], has_types: bool = True) -> tuple:
    """A step of whole texts: no blocks, and no logits."""
    num_tokens = sum(lengths)
    return (
        torch.randint(0, 50, (num_tokens,), dtype=torch.int32),
        torch.cat([torch.arange(length) for length in lengths]),
        encoder_metadata(lengths),
        torch.zeros(0, dtype=torch.int64),
        torch.randint(0, 2, (num_tokens,), dtype=torch.int32) if has_types else None,
    )


@needs_native
@pytest.mark.parametrize("bits", [None, 8], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_encoder_is_one_call_without_logits(dtype, bits, logged):
    torch.manual_seed(0)
    ops = registry.select("cpu", dtype, head_dim=8)
    model = Encoder(ops, dtype, bits)
    program = record_step(model, ops, Limits(64, 6, 6))
    assert program is not None, logged()
    with torch.inference_mode():
        for lengths in ([1], [5, 1, 30], [64], [9] * 6):
            step = texts(lengths)
            (hidden,) = (result.clone() for result in program(*step))
            (expected,) = OpByOp(model, ops)(*step)
            assert hidden.shape == (sum(lengths), 32) and torch.equal(hidden, expected)
            # the last text alone
            start = sum(lengths[:-1])
            alone = texts(lengths[-1:])
            alone = *(tensor[start:] for tensor in step[:2]), *alone[2:4], step[4][start:]
            assert torch.equal(program(*alone)[0], hidden[start:])
    with pytest.raises(TypeError, match="token_types must be"):
        program(*texts([3], has_types=False))
