"""Steps of a tiny model with its state on the device, in the interpreter, with a chunk, a
look-ahead, a reused slot and LoRA adapters: the reference's tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quire.executor.input_batch import InputBatch
from quire.executor.loras import Loras
from quire.executor.runner.assembly import RunnerState, assemble, on_device
from quire.executor.runner.cuda_graphs import GraphedStep
from quire.executor.runner.model_runner import ModelRunner
from quire.executor.runner.padded_graphs import PaddedStep
from quire.executor.sampling.token_stages import make_stages
from quire.executor.weights.lora_files import AdapterWeights
from quire.ipc.config import LoRAConfig
from quire.ipc.lora import LoRARequest
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import NewRequestData, SchedulerOutput
from quire.kernels.lora import in_blocks
from quire.tests.executor.on_device import FakeCapture, LateCopies
from quire.tests.kernels.triton import guard  # noqa: F401  patches the interpreter
from quire.tests.kernels.triton.interpreted.test_model import BLOCK_SIZE, build

NUM_SLOTS, MAX_LEN, CPU = 3, 64, torch.device("cpu")
GREEDY, DRAWN = (
    SamplingParams(temperature=0.0, seed=0),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.9, seed=5),
)


def make_runner(device: str, copies: LateCopies | None = None) -> ModelRunner:
    """With its state on the device, and with graphs, if there are `copies`."""
    config = LoRAConfig(enable_lora=True, max_loras=2, max_lora_rank=4)
    model, ops = build("Qwen3ForCausalLM", device, config)
    stages, loras = make_stages(ops, 100, NUM_SLOTS, MAX_LEN), Loras(config, torch.float32)
    loras.use_model(model)
    for number in (1, 2):
        loras.add(lora(number), random_adapter(model, number))
    batch = InputBatch(NUM_SLOTS, MAX_LEN, BLOCK_SIZE, stages, loras=loras)
    if copies is None:
        return assemble(RunnerState(batch, CPU), model, ops)
    sizes, others = (MAX_LEN, BLOCK_SIZE), (CPU, FakeCapture(), 1, True)
    padded = PaddedStep(model, ops, 16, NUM_SLOTS, *sizes, *others)
    graphs = GraphedStep(model, ops, NUM_SLOTS, *sizes, *others, other_steps=padded)
    runner = assemble(on_device(RunnerState(batch, CPU), ops, copies), model, ops, graphs)
    runner.launched.launcher.warm_up()
    copies.forget()
    return runner


def lora(number: int) -> LoRARequest:
    return LoRARequest(str(number), number, "/nowhere")


def random_adapter(model: Any, seed: int) -> dict[str, AdapterWeights]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    adapter = {}
    for name, (layer, index) in model.adapted_modules.items():
        of, rank = layer.adapted(index), 2 + seed
        a = random(of.in_features, rank) if of.is_embedding else random(rank, of.in_features)
        adapter[name] = AdapterWeights(a, in_blocks(random(of.out_features, rank)), 0.5)
    return adapter


def new(slot: int, tokens: list[int], params: SamplingParams, adapter: int = 0) -> NewRequestData:
    used = lora(adapter) if adapter else None
    return NewRequestData(slot, str(slot), tokens, len(tokens), params, lora_request=used)


def steps(first: int, second: int) -> list[SchedulerOutput]:
    """The adapters of two of three requests; 0: none."""
    return [
        SchedulerOutput(
            0,
            [0, 2],
            [3, 10],
            [0, 0],
            [[1], [2, 3]],
            [new(0, [5, 6, 7], GREEDY), new(2, list(range(17)), DRAWN, first)],
        ),
        # a decode together with the rest of a prompt
        SchedulerOutput(1, [0, 2], [1, 7], [3, 10], [[], []]),
        SchedulerOutput(2, [0, 2], [1, 1], [4, 17], [[], []], num_lookahead_tokens=[1, 0]),
        SchedulerOutput(
            3,
            [2, 0],
            [1, 4],
            [18, 0],
            [[], [8]],
            [new(0, [9, 8, 7, 6], DRAWN, second)],
            freed_slots=[0],
        ),
    ]


@pytest.mark.slow
def test_the_tokens_equal_the_references():
    copies = LateCopies()
    reference, runner = make_runner("cpu"), make_runner("cuda", copies)
    todo = steps(2, 1)
    expected = [reference.execute_model(step) for step in todo]
    plain = make_runner("cpu")
    assert expected != [plain.execute_model(step) for step in steps(0, 0)]
    launched = [runner.launch_model(step) for step in todo]
    assert copies.events == [f"launched {n}" for n in range(len(todo))]
    assert [step.result() for step in launched] == expected
    assert [sum(result.num_sampled) for result in expected] == [1, 2, 3, 2]
