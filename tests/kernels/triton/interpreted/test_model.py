"""A complete tiny model on the GPU kernels in the interpreter: prefill, a chunk together with a
decode, decode; the logits are the reference's.
"""

from typing import NamedTuple

import pytest
import torch
from quire.executor.kernel_choice import INVARIANT_ON_A_GPU
from quire.executor.loras import adapted_modules
from quire.executor.models.decoder import Decoder
from quire.executor.models.experts import MixtureOfExperts
from quire.executor.models.layers import LayerFactory
from quire.executor.weights.loader import fill_with_random_weights
from quire.ipc.config import LoRAConfig
from quire.ipc.models.architectures import ARCHITECTURES
from quire.kernels import registry
from quire.kernels.ops import AttentionMetadata
from quire.tests.kernels.triton.guard import reachable

BLOCK_SIZE = 16
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def build(
    name: str,
    device: str,
    loras: LoRAConfig | None = None,
    kernels: dict[str, str] | None = None,
):
    """Builds the model on tensors in host memory, with the operations of `device`. loras: the
    layers take adapters. kernels: of the GPU, others than by default.
    """
    row = ARCHITECTURES[name]
    config = row.parse(SHAPE | OWN.get(name, {}))
    ops = registry.select(
        device,
        torch.float32,
        (kernels or {}) if device == "cuda" else dict.fromkeys(registry.CONTRACTS, "reference"),
        head_dim=16,
    )
    make = LayerFactory(ops, torch.float32, torch.device("cpu"), loras=loras)
    model = Decoder.of_row(row, config, make, 128)
    if loras is not None:
        model.use_adapters(make.adapter_rows, adapted_modules(model))
    fill_with_random_weights(model, 0, lambda stage, fraction: None, make.fill)
    for layer in model.attention_layers():
        layer.key_cache, layer.value_cache = torch.full((2, 9, BLOCK_SIZE, 2, 16), torch.nan)
    return model, ops


def metadata(
    query_lens: list[int], seq_lens: list[int], block_tables: torch.Tensor
) -> tuple[torch.Tensor, AttentionMetadata]:
    """-> positions and metadata."""
    positions = torch.cat([torch.arange(n - q, n) for q, n in zip(query_lens, seq_lens)])
    rows = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
    slots = block_tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.tensor([0, *query_lens]).cumsum(0, dtype=torch.int32)
    num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    return positions, AttentionMetadata(
        starts,
        torch.tensor(seq_lens, dtype=torch.int32),
        block_tables,
        slots,
        num_decodes,
        query_lens,
        seq_lens,
    )


OWN = {
    "Gemma2ForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "Qwen3ForCausalLM": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "GptOssForCausalLM": {
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 0.05,
    },
}


def experts_of(model) -> list[torch.Tensor]:
    """Weights and biases, which kernels reach by addresses."""
    blocks = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MixtureOfExperts)]
    packed = [layer.packed for block in blocks for layer in (*block.gate_up, *block.down)]
    return [tensor for layer in packed for tensor in (layer.weight, layer.bias)]


@torch.inference_mode()
def run(name: str, device: str) -> list[torch.Tensor]:
    model, ops = build(name, device)
    block_tables = torch.tensor([[7, 2], [4, 1]], dtype=torch.int32)
    token_ids = torch.randint(
        0, 100, (30,), generator=torch.Generator().manual_seed(1), dtype=torch.int32
    )
    results, taken = [], 0
    for query_lens, seq_lens in (([17, 3], [17, 3]), ([1, 3], [18, 6]), ([1, 1], [19, 7])):
        count = sum(query_lens)
        positions, step = metadata(query_lens, seq_lens, block_tables)
        with reachable(experts_of(model) if device == "cuda" else []):
            hidden = model(token_ids[taken : taken + count], positions, step)
        last = torch.tensor(query_lens).cumsum(0) - 1
        results.append(model.compute_logits(ops.gather_rows(hidden, last)))
        taken += count
    return results


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "GptOssForCausalLM"])
def test_a_model_gives_the_references_logits(name):
    for mine, expected in zip(run(name, "cuda"), run(name, "cpu"), strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


class Span(NamedTuple):
    """Tokens of a request that a step computes."""

    request: int
    begin: int
    end: int
    blocks: tuple[int, int]  # of the request's context


@torch.inference_mode()
def logits_of(name: str, *steps: list[Span]) -> list[torch.Tensor]:
    """The logits of request 0, which has 24 tokens, in each step that computes some of them, in a
    model with the kernels of batch_invariant. Request 1 has other tokens, and request 2 begins with
    a block of those of request 0.
    """
    model, _ = build(name, "cuda", kernels=INVARIANT_ON_A_GPU)
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(0, 100, (3, 24), generator=generator, dtype=torch.int32)
    token_ids[2, :BLOCK_SIZE] = token_ids[0, :BLOCK_SIZE]
    results = []
    for spans in steps:
        tokens = torch.cat([token_ids[one.request, one.begin : one.end] for one in spans])
        tables = torch.tensor([one.blocks for one in spans], dtype=torch.int32)
        query_lens = [one.end - one.begin for one in spans]
        positions, step = metadata(query_lens, [one.end for one in spans], tables)
        with reachable(experts_of(model)):
            hidden = model(tokens, positions, step)
        if spans[0].request == 0:
            results.append(model.compute_logits(hidden[: query_lens[0]]))
    return results


HERE, THERE = (7, 2), (4, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "Qwen2ForCausalLM",
        pytest.param("Qwen3ForCausalLM", marks=pytest.mark.slow),
        pytest.param("GptOssForCausalLM", marks=pytest.mark.slow),
    ],
)
def test_logits_have_the_same_bits_however_a_request_is_computed(name, ordered_dots):
    """Alone, beside others and in chunks, again after a preemption, and after a cached prefix."""
    [whole] = logits_of(name, [Span(0, 0, 24, HERE)])
    first, then, again, after_prefix, last = logits_of(
        name,
        [Span(0, 0, 17, HERE), Span(1, 0, 5, THERE)],
        [Span(0, 17, 18, HERE), Span(1, 5, 6, THERE)],
        [Span(2, 0, 19, HERE)],  # in the blocks of a request that is preempted
        [Span(0, 0, 19, (8, 5)), Span(2, 19, 20, HERE)],
        [Span(0, BLOCK_SIZE, 23, (7, 6)), Span(1, 6, 9, THERE)],  # the first block is request 2's
        [Span(0, 23, 24, (7, 6))],
    )
    assert torch.equal(torch.cat([first, then]), whole[:18])
    assert torch.equal(again, whole[:19])
    assert torch.equal(torch.cat([after_prefix, last]), whole[BLOCK_SIZE:])
