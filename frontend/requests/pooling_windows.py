"""Runs many requests that pool through a blocking engine: texts are tokenized in chunks and
submitted in windows, so that memory depends on the results alone.

Must not know: what becomes of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from ...ipc.params import PoolingParams
from ..pooling_outputs import PoolingRequestOutput
from .prompts import Prompt

if TYPE_CHECKING:
    from ..llm_engine import LLMEngine

CHUNK = 128  # texts that are tokenized together


def run_in_windows(
    engine: LLMEngine,
    prompts: Iterable[tuple[Prompt, PoolingParams]],
    num_prompts: int | None,
    first_id: int,
    take: Callable[[int, PoolingRequestOutput], None],
    trace_headers: dict[str, str] | None = None,
    num_before: int = 0,
    **options: Any,
) -> None:
    """Calls `take` with each prompt's index and output, as they come.

    `num_prompts`, for error messages; None: unknown. `num_before`, also for messages: how many
    prompts of the caller's list precede these. The requests have the ids from `first_id` on.
    `options`: of InputProcessor.process_batch. Raises InvalidParameterError with the prompt's
    index; prompts before it may have been computed. The caller aborts what is unfinished after an
    exception.
    """
    window = 2 * max(engine.config.num_seqs_at_once, CHUNK)
    more, num_submitted, num_taken, is_at_end = iter(prompts), 0, 0, False
    while not is_at_end or num_taken < num_submitted:
        while not is_at_end and num_submitted - num_taken <= window - CHUNK:
            chunk = list(islice(more, CHUNK))
            is_at_end = len(chunk) < CHUNK
            # process_batch takes prompts with the same parameters
            for _, some in groupby(chunk, lambda entry: id(entry[1])):
                texts, params = zip(*some)
                requests = engine.process_batch(
                    [str(first_id + num_submitted + i) for i in range(len(texts))],
                    texts,
                    params[0],
                    part=(num_before + num_submitted, num_prompts),
                    **options,
                )
                for request in requests:
                    engine.submit(request, trace_headers)
                num_submitted += len(texts)
        for output in engine.step():
            assert isinstance(output, PoolingRequestOutput)  # the caller's are the only requests
            take(int(output.request_id) - first_id, output)
            num_taken += 1
