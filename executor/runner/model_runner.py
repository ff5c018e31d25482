"""Runs the steps of one model on one rank: from a SchedulerOutput to sampled tokens.

Must not know: requests beyond their slot, why something was scheduled, other processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ...kernels.registry import OpTable
from ..device import wake_threads
from ..input_batch import InputBatch
from ..model import Forward, Model, uncounted
from ..plugins import plugin_failure
from ..program.step_program import OpByOp
from .bursts import Bursts
from .launched_steps import HostStep, LaunchedSteps, PendingStep
from .plain_step import PlainStep, StepRunner
from .speculation.verification import Speculation
from .step_inputs import dummy_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ModelRunner:
    """Made by runner/assembly.py of one model with its weights, caches and tables, and made anew
    when any of them moves. `apply`: puts a step's differences into the tables. `launched`: None
    where steps cannot be launched without waiting, else it is `step`.
    """

    model: Model
    ops: OpTable
    batch: InputBatch
    device: torch.device
    forward: Forward  # a program, graphs, or operation by operation
    run_pass: Forward  # with what stages and taps need around it
    plain: PlainStep
    bursts: Bursts | None
    speculation: Speculation | None
    launched: LaunchedSteps | None
    apply: Callable[[SchedulerOutput], None]
    step: StepRunner

    @property
    def program(self) -> Forward | None:
        """The native program or the graphs; None: the model runs operation by operation."""
        return None if isinstance(self.forward, OpByOp) else self.forward

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Computes the scheduled tokens and samples the rows that are complete.

        Logits that are not finite are their own row's error. An exception from a plugin's code ends
        the requests of its step, except on a GPU, whose state is unknown then. A stage before the
        last one samples no rows; see StageStep.
        """
        wake_threads()
        self.apply(scheduler_output)
        try:
            return self.step.execute_model(scheduler_output)
        except Exception as error:
            return self._failed(scheduler_output, error)

    def _failed(self, scheduler_output: SchedulerOutput, error: Exception) -> ModelRunnerOutput:
        slots, failure = scheduler_output.slots, plugin_failure(error)
        if failure is None or self.device.type != "cpu":
            raise error
        logger.error("%s", failure, exc_info=error)
        return ModelRunnerOutput([0] * len(slots), [], errors=dict.fromkeys(slots, failure))

    @torch.inference_mode()
    def launch_model(self, scheduler_output: SchedulerOutput) -> PendingStep | HostStep:
        """As execute_model, but returns without waiting: see LaunchedSteps."""
        assert self.launched is not None
        self.apply(scheduler_output)
        return self.launched.launch(scheduler_output)

    @torch.inference_mode()
    def execute_dummy_batch(
        self, num_tokens: int = 1, num_logits: int = 1, is_sampled: bool = False
    ) -> None:
        """A forward pass of `num_tokens` one-token rows without effect on the cache.

        Computes logits of `num_logits` rows, as for prompts, and samples each of them if
        `is_sampled`.
        """
        batch = self.batch
        model = self.model
        has = batch.loras is not None, bool(model.state_layers()), model.images is not None
        step = dummy_step(num_tokens, num_logits, batch.num_groups, self.device, *has)
        with uncounted(self.model):
            _, *results = self.run_pass(*step, step[0] if self.model.num_token_types else None)
        if is_sampled and results:
            logits, seeds = results[0], torch.zeros_like(step[3])
            halves, ones = torch.full_like(seeds, 0.5, dtype=torch.float32), seeds.int() + 1
            for filters in ((ones, halves, halves), (None, None, None)):
                self.ops.sample_tokens(logits, halves, *filters, seeds, seeds)
