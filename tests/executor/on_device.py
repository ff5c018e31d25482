"""Device state without a device: the path of a GPU's steps, on tensors in host memory, with tokens
that arrive as late as possible.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from quire.executor.model import Forward
from quire.executor.runner.assembly import on_device
from quire.executor.runner.cuda_graphs import GraphedStep
from quire.executor.worker import Worker


class LateCopies:
    """A CopyToHost that copies only when the result is awaited. Memory that is reused too early
    gives wrong results. Records every wait.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_copies = 0

    def forget(self) -> None:
        """Forget the copies before the first step."""
        self.events, self.num_copies = [], 0

    def __call__(self, values: torch.Tensor) -> Callable[[], np.ndarray]:
        number, self.num_copies = self.num_copies, self.num_copies + 1
        self.events.append(f"launched {number}")

        def wait() -> np.ndarray:
            self.events.append(f"waits for {number}")
            return values.numpy().copy()

        return wait


class FakeCapture:
    """Replays by calling the function again. It reads the present contents of tensors, but host
    lists keep their values from the capture, as in a graph.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.num_replays = 0
        self.graphs: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()  # those in use

    def __call__(
        self, function: Callable[[], tuple[torch.Tensor, ...]]
    ) -> tuple[Callable[[], None], tuple[torch.Tensor, ...]]:
        results = function()
        self.sizes.append(len(results[0]))

        def replay() -> None:
            self.num_replays += 1
            for result, new in zip(results, function(), strict=True):
                result.copy_(new)

        self.graphs.add(replay)
        return replay, results


def capture_decodes(worker: Worker) -> FakeCapture:
    """Run decode steps from graphs from now on."""
    if worker.runner.ops.chosen["paged_attention"] == "cpu":
        pytest.skip(
            "torch's attention takes lengths from the lists on the host, which stay as they were "
            "in a graph; there are no native kernels"
        )
    capture = FakeCapture()
    config = worker.config
    sizes = (
        config.scheduler_config.max_num_seqs,
        config.model_config.max_model_len,
        config.cache_config.block_size,
    )
    graphs = GraphedStep(
        worker.model,
        worker.ops,
        *sizes,
        worker.device,
        capture,
        len(worker.kv_cache_windows),
        worker.loras.is_enabled,
        worker._states is not None,
        worker.model.images is not None,
    )
    use_forward(worker, graphs)
    return capture


def use_forward(worker: Worker, forward: Forward | None) -> None:
    """Run the model in this way from now on; None: operation by operation."""
    worker._forward = forward
    worker._assemble()


def keep_state_on_device(worker: Worker, copies: Any) -> None:
    """Keep the state of a worker that has loaded its model as on a GPU from now on."""
    worker._state = on_device(worker.state, worker.ops, copies)
    worker._assemble()
    worker.runner.launched.launcher.warm_up()
    copies.forget()


def keep_on_device(patch: pytest.MonkeyPatch, copies: Any, with_graphs: bool = False) -> None:
    """Keep the state of every worker that is loaded from now on as on a GPU."""
    load_model, make_forward = Worker.load_model, Worker._make_forward

    def load(self: Worker, *args: Any) -> None:
        load_model(self, *args)
        copies.forget()

    def graphs(self: Worker) -> Forward | None:
        capture_decodes(self)
        return self._forward

    patch.setattr(Worker, "load_model", load)
    patch.setattr(Worker, "_copy_to_host", lambda self: copies)
    patch.setattr(Worker, "_make_forward", graphs if with_graphs else make_forward)
