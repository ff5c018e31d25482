"""Graphs of ranks on a fake GPU (tests/fake_gpu.py): all ranks capture the same sizes in the same
order, since a capture calls the others; tokens are those of one rank on a CPU. The ranks are
threads.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from quire.executor.models.decoder import Decoder
from quire.executor.models.gemma import LayerInputs
from quire.ipc.params import SamplingParams
from quire.tests.executor.driver import generate, start_executor
from quire.tests.executor.rank_threads import RankThreads
from quire.tests.executor.ranks.test_steps_in_flight import (
    check_equal,
    drafting,
    jobs_of,
    run_jobs,
)
from quire.tests.fake_gpu import FakeGpu, fake_gpu

OPTIONS = {"max_num_batched_tokens": 128, "max_num_seqs": 8, "max_model_len": 128}


def run(executor: Any) -> list[list[int]]:
    """Chunks of prompts beside decodes, then decodes alone."""
    chance, found = random.Random(3), []
    for seed, count in enumerate((1, 3)):
        prompts = [[chance.randrange(300) for _ in range(length)] for length in (5, 40, 2)[:count]]
        params = SamplingParams(temperature=0.8 * seed, seed=seed)
        found += generate(executor, prompts, 5, params, chunk=lambda row: chance.choice((9, 70)))
    return [row.output for row in found]


def captured(gpu: FakeGpu) -> list[int]:
    """The sizes of all graphs, in order: those of each rank."""
    of_ranks = [capture.sizes for capture in gpu.captures if capture.sizes]
    assert all(sizes == of_ranks[0] for sizes in of_ranks)
    assert all(capture.num_replays for capture in gpu.captures if capture.sizes)
    return of_ranks[0]


@pytest.mark.sampled(step=3)
@pytest.mark.parametrize(
    ("kind", "size", "num_stages"),
    [("qwen3", 2, 1), ("qwen3_next", 2, 2), ("gemma3n_text", 1, 2)],
)
def test_graphs_change_no_token(tiny: Any, kind: str, size: int, num_stages: int) -> None:
    model = tiny(kind)
    expected = run(start_executor(model, **OPTIONS))
    with fake_gpu() as gpu:
        ranks = RankThreads.of(model, size, num_stages, device="cuda", **OPTIONS)
        assert run(ranks) == expected
        assert len(gpu.captures) == len(ranks.ranks) == size * num_stages
        assert sorted(captured(gpu)) == [1, 4, 8, 64, 128]
        ranks.shutdown()


@pytest.mark.slow
def test_a_capture_leaves_the_inputs_of_later_stages(tiny: Any, monkeypatch: Any) -> None:
    """It runs the pass, which adds to them. Norms hide that from tokens, so what is sent counts."""
    model, errors = tiny("gemma3n_text"), list[float]()
    send = Decoder.send_stream

    def recorded(self: Decoder, hidden: torch.Tensor) -> None:
        inputs, count = self.layer_inputs, len(hidden)
        if isinstance(inputs, LayerInputs):
            own = [inputs.of(layer, count) for layer in range(inputs.num_layers)]
            errors.append(float((inputs.state[:count] - torch.cat(own, 1).flatten(1)).abs().max()))
        send(self, hidden)

    monkeypatch.setattr(Decoder, "send_stream", recorded)
    with fake_gpu() as gpu:
        ranks = RankThreads.of(model, 1, 2, device="cuda", **OPTIONS)
        errors.clear()
        generate(ranks, [[7, 8, 9], [5] * 9], 3, SamplingParams(temperature=0.0))
        assert 64 in captured(gpu) and errors  # which is captured in the first step
        ranks.shutdown()
    assert max(errors) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "num_stages"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_heads_of_ranks_draft_from_graphs(size: int, num_stages: int) -> None:
    """What they read of layers passes the stages: the drafts that are accepted are a CPU's."""
    found = []
    for device in ("cpu", "cuda"):
        with fake_gpu() as gpu:
            config = drafting("eagle3", size, num_stages, device=device, **OPTIONS)
            ranks, jobs = RankThreads(config), jobs_of(4, 4)
            answers, core = run_jobs(ranks, config, jobs)
            metrics = core.observer.get_metrics()
            found.append((answers, [metrics[f"num_{one}_tokens"] for one in ("draft", "accepted")]))
            ranks.shutdown()
    check_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] and min(found[0][1]) > 0
    sizes = Counter(tuple(capture.sizes) for capture in gpu.captures)
    assert len(sizes) > 1 and all(count % size == 0 for count in sizes.values())
