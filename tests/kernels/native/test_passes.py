"""Several steps of a recorded model in one run: the bits of separate runs, on every instruction set
and number of threads.
"""

from __future__ import annotations

import pytest
import torch
from quire.kernels.cpu.native.library import library
from quire.kernels.ops import AttentionMetadata
from torch import Tensor

if library is None:
    pytest.skip("the native library is not built", allow_module_level=True)

from quire.kernels import registry
from quire.kernels.cpu.native.passes import Passes
from quire.kernels.cpu.native.program import recording
from quire.kernels.cpu.native.recorder import Guard, Limits, Recorder
from quire.kernels.cpu.native.replay import Program

HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS, VOCABULARY = 2, 16, 4, 128, 90
CONTEXTS = [1, 3, 4, 17, 30]  # tokens before each row's first


class Model:
    """Attention over the earlier tokens, and a head: each token depends on all before it."""

    def __init__(self, dtype: torch.dtype):
        self.ops = registry.select(
            "cpu",
            dtype,
            head_dim=HEAD_DIM,
            num_heads=HEADS,
            num_kv_heads=HEADS,
            block_size=BLOCK_SIZE,
        )
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(VOCABULARY, HEADS * HEAD_DIM, generator=generator).to(dtype)
        self.head = self.ops.pack_linear(
            torch.randn(VOCABULARY, HEADS * HEAD_DIM, generator=generator).to(dtype), None
        )
        self.cos_sin = torch.randn(64, HEAD_DIM, generator=generator)
        self.caches = torch.randn(
            2, NUM_BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM, generator=generator
        ).to(dtype)
        self.before = self.caches.clone()

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        logits_indices: Tensor,
    ) -> tuple[Tensor, ...]:
        ops = self.ops
        query, key, value = (
            ops.embedding(token_ids, self.table).view(len(token_ids), HEADS, HEAD_DIM)
            for _ in range(3)
        )
        ops.rotary_embedding(positions, query, key, self.cos_sin)
        ops.reshape_and_cache(key, value, *self.caches, metadata.slot_mapping)
        hidden = ops.paged_attention(query, *self.caches, metadata, HEAD_DIM**-0.5).view(
            len(token_ids), HEADS * HEAD_DIM
        )
        logits = self.head.logits(ops.gather_rows(hidden, logits_indices))
        return hidden, logits, *ops.argmax(logits)

    def record(self) -> Program:
        recorder = Recorder(Limits(num_tokens=16, num_requests=8, num_logits=8))
        with torch.inference_mode(), recording(recorder, Guard()):
            results = self(
                recorder.token_ids, recorder.positions, recorder.metadata, recorder.logits_indices
            )
        return Program(recorder, *results, owners=self)


def make_step(
    contexts: list[int], token_ids: Tensor, num_ahead: int
) -> tuple[Tensor, Tensor, AttentionMetadata, Tensor]:
    """Rows after `contexts` tokens each, with room for num_ahead more; the size of a block table
    does not depend on the context.
    """
    count, positions = len(contexts), torch.tensor(contexts)
    blocks = torch.randperm(
        NUM_BLOCKS, generator=torch.Generator().manual_seed(2), dtype=torch.int32
    ).view(8, -1)[:count]
    blocks = blocks[:, : -(-(max(contexts) + 1 + num_ahead) // BLOCK_SIZE)].contiguous()
    slots = (
        blocks.long()[torch.arange(count), positions // BLOCK_SIZE] * BLOCK_SIZE
        + positions % BLOCK_SIZE
    )
    lengths = [context + 1 for context in contexts]
    metadata = AttentionMetadata(
        torch.arange(count + 1, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        blocks,
        slots,
        count,
        [1] * count,
        lengths,
    )
    return token_ids.int(), positions, metadata, torch.arange(count)


def draw_columns(count: int, filtered: bool) -> list[Tensor | None]:
    """Columns from temperature to seeds; the first row is greedy."""
    filters = (
        (torch.arange(count) * 7, torch.full((count,), 0.9), torch.full((count,), 0.01))
        if filtered
        else (None, None, None)
    )
    return [torch.tensor([0.0] + [0.8] * (count - 1)), *filters, torch.arange(count) + 5]


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("draws", [None, False, True], ids=["largest", "drawn", "filtered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_many_steps_one_by_one(isa, dtype, draws, num_threads):
    library.set_num_threads(num_threads)
    model = Model(dtype)
    program = model.record()
    passes = Passes(program, BLOCK_SIZE)
    # sizes repeat and alternate
    for num_rows, count in ((1, 1), (1, 8), (5, 2), (5, 9), (3, 5), (5, 9)):
        contexts, first = CONTEXTS[:num_rows], torch.arange(num_rows) * 11 % VOCABULARY
        columns = None if draws is None else draw_columns(num_rows, draws)
        model.caches.copy_(model.before)
        expected, token_ids = [], first
        for i in range(count):
            positions = [context + i for context in contexts]
            _, logits, largest, _ = program(*make_step(positions, token_ids, 0))
            drawn = (
                None
                if columns is None
                else model.ops.sample_tokens(logits.clone(), *columns, torch.tensor(positions) + 1)
            )
            token_ids = (largest if drawn is None else drawn).clone()
            expected.append(token_ids)
        cache = model.caches.clone()
        model.caches.copy_(model.before)
        draw = None if columns is None else (*columns, torch.tensor(contexts) + 1)
        tokens, is_finite = passes(*make_step(contexts, first, count - 1), count, draw)
        assert torch.equal(tokens, torch.stack(expected)) and is_finite.all()
        assert torch.equal(model.caches.view(torch.uint8), cache.view(torch.uint8))
    assert len(set(tokens.flatten().tolist())) > 5  # otherwise the comparison would show little


def test_non_finite_logits_are_reported_from_their_step_on(isa):
    model = Model(torch.float32)
    passes = Passes(model.record(), BLOCK_SIZE)
    step = make_step([4, 17], torch.tensor([3, 40]), 5)
    tokens, _ = passes(*step, 6)
    poison = int(tokens[2, 1])  # row 1 reads it in step 3
    others = {*tokens[:, 0].tolist(), *tokens[:2, 1].tolist(), 3, 40}
    assert poison not in others
    model.caches.copy_(model.before)
    model.table[poison] = float("nan")
    again, is_finite = passes(*make_step([4, 17], torch.tensor([3, 40]), 5), 6)
    assert is_finite.tolist() == [[True, True]] * 3 + [[True, False]] * 3
    assert torch.equal(again[:, 0], tokens[:, 0]) and torch.equal(again[:3, 1], tokens[:3, 1])


def test_a_step_that_is_too_large_is_refused(isa):
    passes = Passes(Model(torch.float32).record(), BLOCK_SIZE)
    with pytest.raises(ValueError, match="larger than the one that was recorded"):
        passes(*make_step([1] * 8, torch.arange(8), 1)[:3], torch.zeros(9, dtype=torch.int64), 2)
