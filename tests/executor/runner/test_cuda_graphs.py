"""Graphs of decode steps, without a GPU: which are captured, what padding rows compute, and the
same tokens as operation by operation.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from quire.executor.model import Model
from quire.executor.runner.cuda_graphs import GraphedStep, graph_sizes
from quire.executor.worker import Worker
from quire.ipc.params import SamplingParams
from quire.kernels.ops import AttentionMetadata
from quire.tests.executor.driver import Driver, Row, check_equal, generate, start_executor
from quire.tests.executor.on_device import FakeCapture, capture_decodes, use_forward

MAX_NUM_SEQS = 13


def started(tiny, dtype: str = "float32", kind: str = "qwen3", **arguments) -> Worker:
    return start_executor(
        tiny(kind), dtype=dtype, max_num_seqs=MAX_NUM_SEQS, max_model_len=128, **arguments
    )


def with_graphs(executor: Worker) -> FakeCapture:
    return capture_decodes(executor)


def run_randomly(executor: Worker, seed: int) -> list[Row]:
    chance = random.Random(seed)
    prompts = [
        [chance.randrange(300) for _ in range(chance.choice((1, 3, 16, 40, 70)))]
        for _ in range(chance.randrange(1, MAX_NUM_SEQS + 1))
    ]
    params = SamplingParams(temperature=chance.choice((0.0, 0.8)), seed=seed, logprobs=3)
    return generate(executor, prompts, 9, params, chunk=lambda row: chance.choice((1, 5, 70)))


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 8, 13, 256, 257, 300, 512, 700, 1024])
def test_graphs_for_every_number_of_requests_with_little_padding(max_num_seqs):
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_num_seqs
    for count in range(1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= count)
        assert size - count < max(8, count / 4)


@pytest.mark.sampled(step=2)
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("float32", "qwen3"), ("bfloat16", "qwen3"), ("float32", "lfm2"), ("float32", "qwen3_next")],
)
def test_replayed_steps_give_the_same_tokens_and_caches(dtype, kind, tiny):
    plain, graphed = started(tiny, dtype, kind), started(tiny, dtype, kind)
    use_forward(plain, None)
    capture = with_graphs(graphed)
    check_equal(graphed, plain, run_randomly, num_seeds=6)
    assert capture.num_replays > 40
    assert set(capture.sizes) <= set(graph_sizes(MAX_NUM_SEQS)) and len(capture.sizes) == len(
        set(capture.sizes)
    )


def test_padding_rows_store_nothing_after_larger_steps(tiny):
    """A large batch leaves its slot mappings in the buffers. A smaller batch must not write there
    again.
    """
    executor = started(tiny)
    with_graphs(executor)
    driver = Driver(executor)
    rows = [driver.add(f"r{i}", list(range(i + 1, i + 20))) for i in range(8)]
    driver.run(3)
    before = [
        cache.clone()
        for layer in executor.model.attention_layers()
        for cache in (layer.key_cache, layer.value_cache)
    ]
    # 3 requests in a graph of 4; the mapping of r3 is still in the buffers
    driver.step(dict.fromkeys(("r0", "r1", "r2"), 1))
    mine = [block for row in rows[:3] for block in row.block_ids]
    for layer, *_ in zip(executor.model.attention_layers()):
        for cache in (layer.key_cache, layer.value_cache):
            kept = before.pop(0)
            cache = cache.clone()
            cache[mine] = kept[mine]
            torch.testing.assert_close(cache, kept, rtol=0, atol=0)


def test_only_steps_of_sampled_decodes_are_captured(tiny):
    executor = started(tiny)
    capture = with_graphs(executor)
    driver = Driver(executor)
    for i in range(5):
        driver.add(f"r{i}", [7, 8, 9, i])
    driver.step(dict.fromkeys(driver.rows, 4))  # prompts
    driver.add("late", [1, 2, 3])
    driver.step(dict.fromkeys(("r0", "r1"), 1) | {"late": 2})  # a chunk beside decodes
    assert capture.sizes == []
    driver.step(dict.fromkeys(("r0", "r1"), 1) | {"late": 1})
    driver.step(dict.fromkeys(driver.rows, 1))
    driver.step({"r4": 1})
    driver.step(dict.fromkeys(("r1", "r2", "r3"), 1))
    assert capture.sizes == [4, 8, 1] and capture.num_replays == 4


def test_the_largest_graph_is_captured_first(tiny):
    executor = started(tiny)
    capture = with_graphs(executor)
    executor.runner.program.prepare()
    assert capture.sizes == [MAX_NUM_SEQS, 1]
    executor.runner.program.prepare()
    assert capture.sizes == [MAX_NUM_SEQS, 1] and capture.num_replays == 0


def test_nothing_derived_before_a_capture_is_used_in_it():
    class Passed(Model):
        has_head = True

        def __call__(self, token_ids, positions, metadata):
            assert not metadata.scratch
            metadata.scratch["derived"] = metadata.seq_lens.clone()
            return token_ids[:, None].float()

        def compute_logits(self, hidden):
            return hidden

    ops = SimpleNamespace(argmax=lambda logits: (logits.argmax(1), logits.isfinite().all(1)))
    step = GraphedStep(Passed(), ops, 4, 64, 16, torch.device("cpu"), FakeCapture())
    for count in (2, 2, 4):
        rows = torch.arange(count)
        metadata = AttentionMetadata(
            torch.arange(count + 1, dtype=torch.int32),
            torch.ones(count, dtype=torch.int32),
            torch.zeros(count, 1, dtype=torch.int32),
            rows,
            count,
            [1] * count,
            [1] * count,
        )
        assert step(rows.int(), rows, metadata, rows)[0].flatten().tolist() == rows.tolist()
