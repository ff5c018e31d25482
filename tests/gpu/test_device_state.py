"""Steps launched without waiting, on a GPU: no launch synchronises, later steps are launched while
an earlier one runs, tokens stay the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quire import LLM, SamplingParams
from quire.executor.device import SecondStream
from quire.executor.runner.launched_steps import StepLauncher
from quire.ipc.params import SamplingParams as Params
from quire.tests.executor.driver import start_executor
from quire.tests.executor.runner.test_launched_steps import DRAWN, PROMPTS, Steps
from quire.tests.tiny_models import save_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ARGUMENTS = {
    "device": "cuda",
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 24,
    "max_num_batched_tokens": 256,
}
MANY_PROMPTS = [[5, 6, 7], [40], list(range(60, 300)), *([n, n + 1, 2 * n] for n in range(3, 36))]
SLEEP_CYCLES = 2 * 10**9  # about a second


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("gpu") / "qwen3", "qwen3", seed=3)


def params(**options) -> list[SamplingParams]:
    """Greedy and random parameters with outputs of several lengths."""
    return [
        SamplingParams(
            temperature=0.8 * (i % 2),
            top_p=0.9,
            top_k=40,
            seed=i,
            max_tokens=20 + i % 7,
            ignore_eos=True,
            **options,
        )
        for i in range(len(MANY_PROMPTS))
    ]


def run(llm: LLM, **options) -> list[list[int]]:
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in MANY_PROMPTS], params(**options), use_tqdm=False
    )
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_overlapped_and_multi_step_give_the_tokens_of_plain_steps(model, enforce_eager) -> None:
    """More than a thousand tokens each; with few blocks, requests are swapped and recomputed in
    between.
    """
    found = []
    for settings in (
        {},
        {"async_scheduling": True},
        {"num_scheduler_steps": 4},
        {"async_scheduling": True, "num_scheduler_steps": 3},
        {"async_scheduling": True, "num_gpu_blocks_override": 40, "preemption_mode": "swap"},
        {
            "async_scheduling": True,
            "num_gpu_blocks_override": 40,
            "preemption_mode": "recompute",
            "num_scheduler_steps": 2,
        },
    ):
        with LLM(
            str(model), engine="inproc", enforce_eager=enforce_eager, **ARGUMENTS, **settings
        ) as llm:
            found += [run(llm), run(llm, logprobs=0)]  # with overlapped steps, and in plain order
    assert all(tokens == found[0] for tokens in found)


@pytest.mark.parametrize(
    "settings", [{}, {"async_scheduling": True}, {"num_scheduler_steps": 4}], ids=str
)
@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "graphs"])
def test_a_launch_does_not_synchronise(model, settings, enforce_eager, monkeypatch) -> None:
    """After all graphs are captured and all kernels compiled."""
    original, num_launches = StepLauncher.launch, 0

    def launch(self, scheduler_output):
        nonlocal num_launches
        num_launches += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(self, scheduler_output)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with LLM(
        str(model), engine="inproc", enforce_eager=enforce_eager, **ARGUMENTS, **settings
    ) as llm:
        expected = run(llm)
        monkeypatch.setattr(StepLauncher, "launch", launch)
        assert run(llm) == expected
    assert num_launches > 10


@pytest.mark.parametrize(
    "options", [Params(temperature=0.0, seed=0), DRAWN], ids=["greedy", "drawn"]
)
def test_later_steps_are_launched_while_an_earlier_one_runs(model, options) -> None:
    executor = start_executor(model, device="cuda", max_num_seqs=5)
    told = []
    for num_cycles in (1, SLEEP_CYCLES):  # the first round captures and compiles
        steps, started = Steps(executor), torch.cuda.Event()
        torch.cuda.synchronize()
        torch.cuda._sleep(num_cycles)
        started.record()
        rows, new = (
            {slot: (0, len(prompt)) for slot, prompt in enumerate(PROMPTS)},
            {slot: (prompt, options) for slot, prompt in enumerate(PROMPTS)},
        )
        steps.submit(rows, new, freed=tuple(range(len(PROMPTS))) if told else ())
        for step in range(5):
            steps.submit(
                {slot: (len(prompt) + step, 1) for slot, prompt in enumerate(PROMPTS)}, lookahead=0
            )
        assert num_cycles == 1 or not started.query(), "a launch waited"
        told.append(steps.tokens())
        assert started.query()
    assert told[0] == told[1]
    executor.shutdown()


def test_values_arrive_while_the_first_stream_continues() -> None:
    """Later writes of the next step to the copied memory do not change the values."""
    device = torch.device("cuda")
    copies, waits = SecondStream(device), []
    for number in range(200):
        values = torch.full((1000,), number, dtype=torch.int32, device=device)
        waits.append(copies(values))
        del values  # its memory may be used for the next one
    assert [wait().tolist() for wait in waits] == [[number] * 1000 for number in range(200)]
    values = torch.ones(4, dtype=torch.int32, device=device)
    wait, after = copies(values), torch.cuda.Event()
    torch.cuda._sleep(SLEEP_CYCLES)
    after.record()
    assert wait().tolist() == [1] * 4 and not after.query()
    torch.cuda.synchronize()
