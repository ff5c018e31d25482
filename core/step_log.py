"""One line of log for a step (`log_steps`).

Must not know: how a step is computed, who reads the log.
"""

from __future__ import annotations

import logging

from ..ipc.step_messages import ModelRunnerOutput
from .observation import StepRecords
from .scheduling.scheduler import Scheduler
from .scheduling.step import ScheduledStep

logger = logging.getLogger(__name__)


def log_step(
    step: ScheduledStep, output: ModelRunnerOutput, scheduler: Scheduler, records: StepRecords
) -> None:
    """Logs a step that has been processed: the queues after it, its tokens, the requests that it
    ended, and the times of its parts.
    """
    _, schedule_s, execute_s, process_s = records.last_times()
    logger.info(
        "step %d: %d running, %d waiting; %d requests, %d prompt tokens computed, %d tokens "
        "sampled, %d finished; schedule %.3f, execute %.3f, process %.3f ms",
        step.output.step,
        len(scheduler.running),
        len(scheduler.waiting) + len(scheduler.held),
        len(step.requests),
        sum(num_tokens for _, num_tokens in step.prefills),
        sum(output.num_sampled),
        sum(request.is_finished for request in step.requests),
        1e3 * schedule_s,
        1e3 * execute_s,
        1e3 * process_s,
    )
