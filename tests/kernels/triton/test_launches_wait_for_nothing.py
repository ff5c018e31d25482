"""A complete step launched with Triton's kernels, none of which runs: no wrapper reads a tensor's
contents, so none could wait for a GPU.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from quire.executor.input_batch import InputBatch
from quire.executor.loras import Loras, adapted_modules
from quire.executor.models.decoder import Decoder
from quire.executor.models.layers import LayerFactory
from quire.executor.runner import device_inputs
from quire.executor.runner.assembly import RunnerState, assemble, on_device
from quire.executor.runner.cuda_graphs import GraphedStep
from quire.executor.runner.model_runner import ModelRunner
from quire.executor.sampling.token_stages import make_stages
from quire.executor.weights.loader import fill_with_random_weights
from quire.ipc.config import LoRAConfig
from quire.ipc.models.architectures import ARCHITECTURES
from quire.ipc.params import SamplingParams
from quire.ipc.step_messages import NewRequestData, SchedulerOutput
from quire.kernels import registry
from quire.tests.executor.on_device import FakeCapture, LateCopies
from quire.tests.kernels.triton.budget import AbsentGpu
from quire.tests.kernels.triton.waiting import NothingWaits
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CPU = torch.device("cpu")
NUM_SLOTS, MAX_LEN, BLOCK_SIZE = 4, 64, 16
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
AROUND = {
    "write_runs_kernel",
    "prepare_step_inputs_kernel",
    "gather_sampling_parameters_kernel",
    "tally_kernel",
    "choose_kernel",
    "append_sampled_tokens_kernel",
}
OF_DRAWS = {"tally_kernel", "choose_kernel"}


def make_runner(copies: LateCopies, with_graphs: bool, config: LoRAConfig) -> ModelRunner:
    ops = registry.select("cuda", torch.float32, head_dim=16)
    make = LayerFactory(ops, torch.float32, CPU, loras=config)
    row = ARCHITECTURES["Qwen3ForCausalLM"]
    model = Decoder.of_row(row, row.parse(SHAPE), make, MAX_LEN)
    if config.enable_lora:
        model.use_adapters(make.adapter_rows, adapted_modules(model))
    fill_with_random_weights(model, 0, lambda stage, fraction: None, make.fill)
    for layer in model.attention_layers():
        layer.key_cache, layer.value_cache = torch.empty(2, 17, BLOCK_SIZE, 2, 16)
    loras = None
    if config.enable_lora:
        loras = Loras(config, torch.float32)
        loras.use_model(model)
    stages = make_stages(ops, 100, NUM_SLOTS, MAX_LEN)
    batch = InputBatch(NUM_SLOTS, MAX_LEN, BLOCK_SIZE, stages, loras=loras)
    graphs = None
    if with_graphs:
        graphs = GraphedStep(
            *(model, ops, NUM_SLOTS, MAX_LEN, BLOCK_SIZE, CPU, FakeCapture()),
            has_adapters=config.enable_lora,
        )
    runner = assemble(on_device(RunnerState(batch, CPU), ops, copies), model, ops, graphs)
    runner.launched.launcher.warm_up()
    copies.forget()
    return runner


class Launches:
    """What is sent to the device: the names of kernels, and the number of copies."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self.kernels: Counter[str] = Counter()
        self.num_copies = 0
        packed = device_inputs.packed

        def upload(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
            self.num_copies += 1
            with torch._C.DisableTorchFunction():  # fills host memory; nothing waits for it
                return packed(arrays, device)

        patch.setattr(driver, "_active", AbsentGpu(90))
        patch.setattr(
            JITFunction,
            "run",
            lambda kernel, *args, **options: self.kernels.update([kernel.__name__]),
        )
        patch.setattr(device_inputs, "packed", upload)

    def take(self) -> tuple[dict[str, int], int]:
        """Return the kernels around the model and the copies since the last call."""
        taken = (
            {name: count for name, count in self.kernels.items() if name in AROUND},
            self.num_copies,
        )
        self.kernels, self.num_copies = Counter(), 0
        return taken


@pytest.mark.parametrize("with_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}],
    ids=["greedy", "drawn", "filtered"],
)
@pytest.mark.parametrize("with_adapters", [False, True], ids=["plain", "adapters"])
def test_steps_are_launched_without_reading_a_tensor(
    sampling, with_graphs, with_adapters, monkeypatch
):
    """One copy per step, and one launch per task, for steps that begin requests and steps that look
    ahead; the third step begins a block. A draw is one launch, with filters two.
    """
    copies, launches = LateCopies(), Launches(monkeypatch)
    config = LoRAConfig(enable_lora=with_adapters, max_loras=2, max_lora_rank=4)
    runner = make_runner(copies, with_graphs, config)
    assert launches.take() == (dict.fromkeys(AROUND - OF_DRAWS, 1), 1)  # warmed up
    params = SamplingParams(**sampling, seed=1)
    prompts = {slot: list(range(slot + 13)) for slot in (0, 2, 3)}
    new = [
        NewRequestData(slot, str(slot), tokens, len(tokens), params)
        for slot, tokens in prompts.items()
    ]
    per_pass = {"prepare_step_inputs_kernel": 1, "append_sampled_tokens_kernel": 1}
    if sampling["temperature"]:
        per_pass |= {"gather_sampling_parameters_kernel": 1, "choose_kernel": 1}
    if "top_p" in sampling:
        per_pass |= {"tally_kernel": 1}

    def launch(
        counts: list[int], computed: list[int], blocks: list[list[int]], **fields
    ) -> tuple[dict[str, int], int]:
        with NothingWaits():
            runner.launch_model(SchedulerOutput(0, [0, 2, 3], counts, computed, blocks, **fields))
        return launches.take()

    lengths = [len(tokens) for tokens in prompts.values()]
    assert launch(lengths, [0] * 3, [[1], [2], [3, 7]], new_requests=new) == (
        per_pass | {"write_runs_kernel": 1},
        1,
    )
    assert launch([1] * 3, lengths, [[]] * 3) == (per_pass, 1)
    assert launch([1] * 3, [n + 1 for n in lengths], [[], [6], []]) == (
        per_pass | {"write_runs_kernel": 1},
        1,
    )
    passes = {name: 5 * count for name, count in per_pass.items()}
    assert launch(
        [1] * 3, [n + 2 for n in lengths], [[4, 5], [], []], num_lookahead_tokens=[4, 4, 2]
    ) == (passes | {"write_runs_kernel": 1}, 1)
    assert copies.events == [f"launched {n}" for n in range(4)]


def test_reading_a_tensor_is_detected(monkeypatch):
    launches, copies = Launches(monkeypatch), LateCopies()
    runner = make_runner(copies, False, LoRAConfig())
    launches.take()
    params = SamplingParams(temperature=0.0, seed=1, logprobs=1)  # processed on the host
    step = SchedulerOutput(0, [1], [3], [0], [[1]], [NewRequestData(1, "r", [1, 2, 3], 3, params)])
    with NothingWaits():
        # the model runs; its logits must be read
        launched = runner.launch_model(step)
        with pytest.raises(AssertionError, match="waits for the GPU"):
            launched.result()
    assert launches.take()[1] == 1 and copies.events == []
