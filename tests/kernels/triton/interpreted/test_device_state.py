"""Steps of a tiny model with its state on the device, in the interpreter, with a chunk, a
look-ahead and a reused slot: the reference's tokens.
"""

from __future__ import annotations

import torch
from quire.executor.models.qwen3 import Qwen3ForCausalLM
from quire.executor.runner.cuda_graphs import GraphedStep
from quire.executor.runner.input_batch import InputBatch
from quire.executor.runner.model_runner import ModelRunner
from quire.executor.sampling.token_stages import make_stages
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import NewRequestData, SchedulerOutput
from quire.tests.executor.on_device import FakeCapture, LateCopies
from quire.tests.kernels.triton import guard  # noqa: F401  patches the interpreter
from quire.tests.kernels.triton.interpreted.test_model import BLOCK_SIZE, build

NUM_SLOTS, MAX_LEN, CPU = 3, 64, torch.device("cpu")
GREEDY, DRAWN = (
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=5),
)


def make_runner(device: str) -> ModelRunner:
    model, ops = build(Qwen3ForCausalLM, device)
    batch = InputBatch(NUM_SLOTS, MAX_LEN, BLOCK_SIZE, make_stages(ops, 100, NUM_SLOTS, MAX_LEN))
    return ModelRunner(model, ops, batch, BLOCK_SIZE, CPU)


def new(slot: int, tokens: list[int], params: SamplingParams) -> NewRequestData:
    return NewRequestData(slot, str(slot), tokens, len(tokens), params)


STEPS = [
    SchedulerOutput(
        0,
        [0, 2],
        [3, 10],
        [0, 0],
        [[1], [2, 3]],
        [new(0, [5, 6, 7], GREEDY), new(2, list(range(17)), DRAWN)],
    ),
    # a decode together with the rest of a prompt
    SchedulerOutput(1, [0, 2], [1, 7], [3, 10], [[], []]),
    SchedulerOutput(2, [0, 2], [1, 1], [4, 17], [[], []], num_lookahead_tokens=[1, 0]),
    SchedulerOutput(
        3, [2, 0], [1, 4], [18, 0], [[], [8]], [new(0, [9, 8, 7, 6], DRAWN)], freed_slots=[0]
    ),
]


def test_the_tokens_equal_the_references():
    reference, copies, runner = make_runner("cpu"), LateCopies(), make_runner("cuda")
    expected = [reference.execute_model(step) for step in STEPS]
    runner.keep_state_on_device(copies)
    copies.forget()
    runner.program = GraphedStep(
        runner.model, runner.ops, NUM_SLOTS, MAX_LEN, BLOCK_SIZE, CPU, FakeCapture()
    )
    launched = [runner.launch_model(step) for step in STEPS]
    assert copies.events == [f"launched {n}" for n in range(len(STEPS))]
    assert [step.result() for step in launched] == expected
    assert [sum(result.num_sampled) for result in expected] == [1, 2, 3, 2]
