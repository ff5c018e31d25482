"""The results for callers: RequestOutput and its parts, with vLLM's names and fields.

Must not know: messages, tokenizers, how an output is produced (output_processor.py).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position: natural logarithm of its probability, rank from 1, and
    its text.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One position: the sampled token (for a prompt: its own) first, then the most likely ones, which
# may include the first.
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class RequestMetrics:
    """The times and counts of a request.

    Each request has one object, which is updated until the request is finished.

    The *_time fields are seconds since 1970, None until known. The later ones are arrival_time plus
    the monotonic time since then, so that setting the system's clock changes no difference. The
    *_ts fields are times of the engine's monotonic clock in seconds, 0.0 until known. With n > 1
    they refer to the first token of any completion and to the last token of all.
    """

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    queued_ts: float = 0.0  # the engine received it
    scheduled_ts: float = 0.0  # its first step began
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0  # or the end of a request that was aborted or failed
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    preemption_ts: list[float] = field(default_factory=list)  # the first 32 of each completion
    # (the engine's step, start, end, tokens) of the first 512 chunks of each completion: its
    # prompt, and tokens that were recomputed after a preemption
    prefill_chunks: list[tuple[int, float, float, int]] = field(default_factory=list)
    # of the first 4096 tokens of all completions; only after set_record_token_times
    token_ts: list[float] = field(default_factory=list)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token, measured in the frontend."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from arrival to the end, measured in the frontend."""
        return None if self.finished_time is None else self.finished_time - self.arrival_time

    @property
    def queued_time(self) -> float | None:
        """Seconds in the engine's queue before its first step."""
        return _between(self.queued_ts, self.scheduled_ts)

    @property
    def prefill_time(self) -> float | None:
        """Seconds from its first step to its first token."""
        return _between(self.scheduled_ts, self.first_token_ts)

    @property
    def decode_time(self) -> float | None:
        """Seconds from its first token to its last."""
        return _between(self.first_token_ts, self.last_token_ts)

    @property
    def inference_time(self) -> float | None:
        """Seconds from its first step to its last token."""
        return _between(self.scheduled_ts, self.last_token_ts)


def _between(begin_ts: float, end_ts: float) -> float | None:
    return end_ts - begin_ts if begin_ts and end_ts else None


@dataclass(slots=True)
class CompletionOutput:
    """One continuation of the prompt.

    `token_ids` includes the stop token; `text` does not, unless include_stop_str_in_output.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    # "stop", "length", "abort", "timeout", "error" (reason in RequestOutput.error); None while it
    # runs
    finish_reason: str | None = None
    # the stop token id or stop string, or an additional end-of-sequence id of the model; None for
    # the main one
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, for json.dumps."""
        return asdict(self)

    def extend(self, delta: CompletionOutput) -> None:
        """Appends the delta that follows this one."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if self.logprobs is not None:
            self.logprobs += delta.logprobs or []
        self.cumulative_logprob = delta.cumulative_logprob
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """The state of a request (CUMULATIVE, FINAL_ONLY: all n completions) or its changes (DELTA:
    only completions that changed).

    `outputs` is in the order of CompletionOutput.index. A failure of one completion does not affect
    the others; `error` is the first failure.
    """

    request_id: str
    prompt: str | None  # None for a prompt given as token ids alone
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    # prompt tokens found in the prefix cache; None until the first token
    num_cached_tokens: int | None = None
    # one per prompt token, None for the first; DELTA: in the first output
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    error: str | None = None  # the failure, if a finish_reason is "error"
    # the user's parameter that the engine rejected; None for a failure
    error_parameter: str | None = None
    kind_is_delta: bool = field(default=False, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as plain values, for json.dumps, also those of the objects within."""
        values = asdict(self)
        del values["kind_is_delta"]
        return values

    def merge(self, newer: RequestOutput) -> None:
        """Adds a later output, for a reader that is slower than the engine.

        Deltas are appended, states replaced.
        """
        if self.kind_is_delta:
            self._add_deltas(newer.outputs)
            self.prompt_logprobs = self.prompt_logprobs or newer.prompt_logprobs
        else:
            self.outputs = newer.outputs
            self.prompt_logprobs = newer.prompt_logprobs
        self.finished = newer.finished
        self.num_cached_tokens = newer.num_cached_tokens
        self.error, self.error_parameter = newer.error, newer.error_parameter

    def _add_deltas(self, newer: list[CompletionOutput]) -> None:
        by_index = {completion.index: completion for completion in self.outputs}
        for delta in newer:
            if delta.index in by_index:
                by_index[delta.index].extend(delta)
            else:
                by_index[delta.index] = delta
        self.outputs = [by_index[index] for index in sorted(by_index)]
