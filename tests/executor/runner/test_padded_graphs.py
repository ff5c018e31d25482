"""Graphs of padded prompts, without a GPU: the tokens, caches and log-probabilities of steps that
run operation by operation, and which steps have graphs.
"""

from __future__ import annotations

import random

import pytest
import torch
from quire.executor.runner.padded_graphs import MOST_TOKENS, STEP, WIDTHS, padded_sizes
from quire.executor.worker import Worker
from quire.ipc.params import SamplingParams
from quire.tests.executor.driver import Driver, Row, check_equal, generate, start_executor
from quire.tests.executor.on_device import FakeCapture, use_forward

MAX_NUM_SEQS = 13


class Sizes(FakeCapture):
    """The numbers of tokens and of logits of every graph."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int]] = []

    def __call__(self, function):
        replay, results = super().__call__(function)
        self.shapes.append((len(results[0]), len(results[1])))
        return replay, results


def started(tiny, kind: str = "qwen3", dtype: str = "float32") -> Worker:
    return start_executor(tiny(kind), dtype=dtype, max_num_seqs=MAX_NUM_SEQS, max_model_len=128)


def with_graphs(executor: Worker) -> Sizes:
    if executor.runner.ops.chosen["paged_attention"] == "cpu":
        pytest.skip("torch's attention takes lengths from the lists on the host")
    capture = Sizes()
    use_forward(executor, executor._make_graphs(capture))
    return capture


def run_randomly(executor: Worker, seed: int) -> list[Row]:
    chance = random.Random(seed)
    prompts = [
        [chance.randrange(300) for _ in range(chance.choice((1, 3, 16, 64, 100)))]
        for _ in range(chance.randrange(1, MAX_NUM_SEQS + 1))
    ]
    params = SamplingParams(temperature=chance.choice((0.0, 0.8)), seed=seed, logprobs=3)
    return generate(executor, prompts, 5, params, chunk=lambda row: chance.choice((1, 5, 70, 100)))


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("gemma3_text", "bfloat16"), ("qwen3_moe", "float32")),
        # these keep states, which neither padding nor a capture may move on
        *(("qwen3_next", "float32"), ("mamba2", "bfloat16"), ("kimi_linear", "float32")),
        ("lfm2", "bfloat16"),
    ],
)
def test_padded_steps_give_the_same_tokens_and_caches(kind, dtype, tiny):
    plain, graphed = started(tiny, kind, dtype), started(tiny, kind, dtype)
    use_forward(plain, None)
    capture = with_graphs(graphed)
    check_equal(graphed, plain, run_randomly, num_seeds=3)
    if plain._states is not None:
        assert torch.equal(graphed._states.places, plain._states.places)
    of_prompts = [shape for shape in capture.shapes if shape[0] >= STEP]
    assert len(of_prompts) == len(set(of_prompts)) > 3  # each once


def test_states_where_graphs_are_captured_while_requests_run(tiny):
    """Beside decodes that look ahead, with copies of states that rows make."""

    def run(executor: Worker) -> tuple[list[list[int]], torch.Tensor]:
        driver = Driver(executor)
        rows = [driver.add(f"r{i}", list(range(i + 1, i + 90))) for i in range(3)]
        driver.step({"r0": 89})
        driver.step({"r0": 1, "r1": 30}, lookahead={"r0": 3})
        driver.step({"r0": 1, "r1": 59, "r2": 70}, lookahead={"r0": 2, "r1": 4})
        driver.step({"r0": 1, "r1": 1, "r2": 19}, lookahead={"r2": 1})
        return [row.output for row in rows], executor._states.places

    plain, graphed = started(tiny, "qwen3_next"), started(tiny, "qwen3_next")
    use_forward(plain, None)
    capture = with_graphs(graphed)
    before = len(capture.shapes)
    (expected, states), (found, kept) = run(plain), run(graphed)
    assert found == expected and [len(tokens) for tokens in found] == [9, 6, 2]
    assert torch.equal(kept, states) and len(capture.shapes) > before + 2


def test_many_rows_with_logits_in_a_small_graph(tiny):
    """As many as the graph has tokens, if it had no row less: those of the padding are others."""
    prompts = [[3 * i + 1, i + 2] for i in range(60)]
    sizes = {"max_num_seqs": 70, "max_model_len": 128, "max_num_batched_tokens": 150}
    plain, graphed = (start_executor(tiny("qwen3"), **sizes) for _ in range(2))
    use_forward(plain, None)
    capture = with_graphs(graphed)

    def run(executor: Worker) -> list[list[int]]:
        driver = Driver(executor)
        rows = [driver.add(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
        for first, count in ((0, 9), (9, 51)):
            driver.step({row.request_id: 2 for row in rows[first : first + count]})
        return [row.output for row in rows]

    assert run(graphed) == run(plain)
    assert {(64, 63), (128, 64)} <= set(capture.shapes)
    assert all(tokens > rows for tokens, rows in capture.shapes if tokens in (64, 128))


def test_which_steps_have_graphs(tiny):
    executor = started(tiny)
    capture = with_graphs(executor)
    most, before = MAX_NUM_SEQS * 128, capture.shapes.copy()
    assert before == [(most, MAX_NUM_SEQS), (MAX_NUM_SEQS, MAX_NUM_SEQS), (1, 1)]
    driver = Driver(executor)
    for i in range(9):
        driver.add(f"r{i}", list(range(i + 1, i + 101)))
    driver.step({"r0": 100})
    driver.step({"r0": 1, "r1": 30, "r2": 30})  # beside a decode
    driver.step({"r1": 70, "r2": 58})
    assert capture.shapes[len(before) :] == [(128, 8), (64, 8)]
    driver.step({f"r{i}": 7 for i in range(3, 9)} | {"r0": 1, "r1": 1, "r2": 12})  # nine rows
    assert capture.shapes[len(before) + 2 :] == [(64, MAX_NUM_SEQS)]


@pytest.mark.parametrize(
    ("tokens", "width", "length"), [(64, 1, 64), (8192, 8, 4096), (300, 4, 99)]
)
def test_sizes_leave_little_padding(tokens, width, length):
    sizes = padded_sizes(tokens, width, length)
    assert sizes == sorted(set(sizes)) and sizes[-1] == min(MOST_TOKENS, tokens, width * length)
    assert all(later - size <= STEP for size, later in zip([0, *sizes], sizes))
    assert not padded_sizes(tokens, width, STEP - 1) and list(WIDTHS) == sorted(WIDTHS)
