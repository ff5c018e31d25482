"""The state of an unfinished request in the frontend.

Must not know: how it changes (output_processor.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...ipc.messages import Array, EngineCoreRequest, FinishReason
from ..outputs import PositionLogprobs, RequestMetrics
from ..text.detokenizer import IncrementalDetokenizer
from .logprobs import LogprobsReader
from .request_timing import Timings


class NoText:
    """The detokenizer of a request that pools: it has no tokens."""

    text = ""

    def update(self, token_ids: list[int], reason: FinishReason | None) -> tuple[int, None]:
        return 0, None

    def take_delta(self) -> str:
        return ""


NO_TEXT = NoText()


@dataclass(slots=True, eq=False)
class CompletionState:
    """One of a request's n completions.

    token_ids: every output token so far. num_emitted: the number of them that an output has carried
    (or counted, for cumulative outputs).
    """

    index: int
    engine_id: str  # identifies its rows, and aborts it alone
    detokenizer: IncrementalDetokenizer | NoText
    logprobs_reader: LogprobsReader | None  # None: no log-probabilities are reported
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
    completions: list[CompletionState]
    is_delta: bool
    is_final_only: bool
    stream_interval: int
    prompt_logprobs_reader: LogprobsReader | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    are_prompt_logprobs_emitted: bool = False
    num_cached_tokens: int | None = None
    # by engine id of the completion
    timings: Timings = field(default_factory=Timings)
    num_unfinished: int = 1
    error: str | None = None
    error_parameter: str | None = None
    # of a request that pools, which has one completion without tokens
    task: str | None = None
    pooled: Array | None = None
