"""Runs many requests that pool through a blocking engine: texts are tokenized in chunks and
submitted in windows, so that memory depends on the results alone.

Must not know: what becomes of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...ipc.params import PoolingParams
from ..pooling_outputs import PoolingRequestOutput
from .prompts import Prompt

if TYPE_CHECKING:
    from ..llm_engine import LLMEngine

CHUNK = 128  # texts that are tokenized together


def run_in_windows(
    engine: LLMEngine,
    prompts: Sequence[Prompt],
    params: Sequence[PoolingParams],
    first_id: int,
    take: Callable[[int, PoolingRequestOutput], None],
    trace_headers: dict[str, str] | None = None,
    **options: Any,
) -> None:
    """Calls `take` with each prompt's index and output, as they come.

    The requests have the ids from `first_id` on. `options`: of InputProcessor.process_batch. Raises
    InvalidParameterError with the prompt's index; prompts before it may have been computed. The
    caller aborts what is unfinished after an exception.
    """
    window = 2 * max(engine.config.scheduler_config.max_num_seqs, CHUNK)
    num_submitted = num_taken = 0
    while num_taken < len(prompts):
        while num_submitted < len(prompts) and num_submitted - num_taken <= window - CHUNK:
            end = min(num_submitted + CHUNK, len(prompts))
            for _, indices in groupby(range(num_submitted, end), lambda i: id(params[i])):
                _submit(engine, prompts, params, list(indices), first_id, trace_headers, options)
            num_submitted = end
        for output in engine.step():
            assert isinstance(output, PoolingRequestOutput)  # the caller's are the only requests
            take(int(output.request_id) - first_id, output)
            num_taken += 1


def _submit(
    engine: LLMEngine,
    prompts: Sequence[Prompt],
    params: Sequence[PoolingParams],
    indices: list[int],
    first_id: int,
    trace_headers: dict[str, str] | None,
    options: dict[str, Any],
) -> None:
    """Sends prompts that have the same parameters."""
    first = indices[0]
    requests = engine.process_batch(
        [str(first_id + i) for i in indices],
        [prompts[i] for i in indices],
        params[first],
        part=(first, len(prompts)),
        **options,
    )
    for request in requests:
        engine.submit(request, trace_headers)
