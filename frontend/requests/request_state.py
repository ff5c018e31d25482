"""The state of an unfinished request in the frontend.

Must not know: how it changes (output_processor.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ...ipc.messages import Array, EngineCoreRequest, FinishReason, RequestTiming
from ...ipc.params import child_seed
from ..outputs import PositionLogprobs, RequestMetrics
from ..text.detokenizer import IncrementalDetokenizer, NoText
from .logprobs import LogprobsReader


@dataclass(slots=True, eq=False)
class CompletionState:
    """One of a request's n completions.

    token_ids: every output token so far. num_emitted: the number of them that an output has carried
    (or counted, for cumulative outputs).
    """

    index: int
    engine_id: str  # identifies its rows, and aborts it alone
    detokenizer: IncrementalDetokenizer | NoText
    logprobs_reader: LogprobsReader | None = None  # None: no log-probabilities are reported
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_emitted: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_end_emitted: bool = False


@dataclass(slots=True, eq=False)
class RequestState:
    """One unfinished request: the state that its completions share.

    It is finished when all completions are finished.
    """

    request_id: str
    prompt: str | None
    core_request: EngineCoreRequest
    clock_offset: float  # as in ProcessedRequest
    metrics: RequestMetrics
    completions: list[CompletionState] = field(default_factory=list)
    is_delta: bool = False
    is_final_only: bool = True
    stream_interval: int = 1
    prompt_logprobs_reader: LogprobsReader | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_missing_prompt_logprobs: int = 0  # that must arrive before the first token
    are_prompt_logprobs_emitted: bool = False
    num_cached_tokens: int | None = None
    # by engine id of the completion: the last timing of each engine that computed it, in order
    timings: dict[str, list[RequestTiming]] = field(default_factory=dict)
    num_unfinished: int = 1
    error: str | None = None
    error_parameter: str | None = None
    # of a request that pools, which has one completion without tokens
    task: str | None = None
    pooled: Array | None = None

    def entries(self) -> list[tuple[EngineCoreRequest, list[int]]]:
        """Returns the engine request and the output tokens so far of each unfinished completion.

        Another engine can continue the request from them. With n > 1 each completion becomes a
        request of its own with its own seed.
        """
        request = self.core_request
        if self.task is not None:
            return [(request, [])]
        params, entries = request.sampling_params, []
        for completion in self.completions:
            if completion.finish_reason is None:
                own = request
                if params.n > 1:
                    assert params.seed is not None  # set by the InputProcessor
                    child_params = msgspec.structs.replace(
                        params, n=1, seed=child_seed(params.seed, completion.index)
                    )
                    own = msgspec.structs.replace(
                        request, request_id=completion.engine_id, params=child_params
                    )
                entries.append((own, list(completion.token_ids)))
        return entries
