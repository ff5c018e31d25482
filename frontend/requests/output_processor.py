"""OutputProcessor: converts EngineCoreOutputs into the RequestOutputs of the frontend's requests.

Must not know: sockets, the scheduler, the consumers of the outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ...ipc.errors import InvalidParameterError
from ...ipc.messages import (
    EngineCoreOutputs,
    Finished,
    FinishReason,
    PromptLogprobs,
    RequestTiming,
    TokenLogprobs,
    child_request_id,
)
from ...ipc.params import PoolingParams, RequestOutputKind, SamplingParams
from ..outputs import CompletionOutput, RequestMetrics, RequestOutput
from ..pooling_outputs import BY_TOKEN, KINDS, AnyOutput, PoolingRequestOutput
from ..text.detokenizer import NO_TEXT, make_detokenizer
from ..text.tokenizer import Tokenizer
from .input_processor import ProcessedRequest
from .logprobs import LogprobsReader, TokenTexts
from .request_state import CompletionState, RequestState

MAX_TOKEN_TS = 4096  # per request


@dataclass(slots=True)
class ProcessedOutputs:
    request_outputs: list[AnyOutput]
    # engine ids of completions that ended here but still run in the engine (a stop string, missing
    # tokens)
    requests_to_abort: list[str]


class OutputProcessor:
    """Owns the frontend's requests from add_request to their last output.

    Rows are looked up by engine id, aborts by user id.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        epoch: int = 0,
        on_finished: Callable[[RequestState, float], None] = lambda state, offset: None,
        requests: dict[str, RequestState] | None = None,
    ):
        """`on_finished` is called with each finished request and the offset from the engine's clock
        to seconds since 1970. `requests`: where they are kept by user id, for others to see.
        """
        self._tokenizer = tokenizer
        self._first_epoch = epoch
        self._epochs: dict[int, int] = {}  # the latest epoch by engine_index
        self._requests = {} if requests is None else requests
        # By engine id: the unfinished completions. With n > 1 the request's own engine id is also a
        # key, because the engine rejects the request under that id.
        self._by_engine_id: dict[str, tuple[RequestState, list[CompletionState]]] = {}
        self._token_texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._on_finished = on_finished
        self._engine_ts = 0.0  # the engine's clock when it sent its last outputs
        self._clock_offset = 0.0  # added to the engine's clock, gives time.monotonic()
        self._records_token_times = False  # fill RequestMetrics.token_ts
        # rows of an earlier engine; rows of requests that ended here are expected and not counted
        self.num_dropped_rows = 0

    def add_request(self, request: ProcessedRequest) -> RequestMetrics:
        """Registers a request. Returns its metrics, which are updated until the request is
        finished.

        Raises InvalidParameterError if an unfinished request has the same user id.
        """
        core_request = request.core_request
        if request.request_id in self._requests:
            raise InvalidParameterError(
                "request_id", f"{request.request_id!r} is already used by a running request"
            )
        num_prompt_tokens = len(core_request.prompt_token_ids)
        metrics = RequestMetrics(core_request.arrival_time, num_prompt_tokens=num_prompt_tokens)
        state = RequestState(
            request.request_id, request.prompt, core_request, request.clock_offset, metrics
        )
        if isinstance(core_request.params, PoolingParams):
            state.task = core_request.params.task
            state.completions.append(CompletionState(0, core_request.request_id, NO_TEXT))
        else:
            self._add_completions(state, core_request.params)
        for completion in state.completions:
            self._by_engine_id[completion.engine_id] = state, [completion]
        self._requests[request.request_id] = state
        return metrics

    def _add_completions(self, state: RequestState, params: SamplingParams) -> None:
        request = state.core_request
        state.is_delta = params.output_kind == RequestOutputKind.DELTA
        state.is_final_only = params.output_kind == RequestOutputKind.FINAL_ONLY
        state.stream_interval = params.stream_interval
        engine_ids = [request.request_id] if params.n == 1 else self._children(state, params.n)
        for i, engine_id in enumerate(engine_ids):
            detokenizer = make_detokenizer(self._tokenizer, request.prompt_token_ids, params)
            state.completions.append(CompletionState(i, engine_id, detokenizer))
        if params.logprobs is not None or params.prompt_logprobs is not None:
            self._add_readers(state, params)

    def _children(self, state: RequestState, num_completions: int) -> list[str]:
        """The engine ids of the completions of a request with n > 1."""
        request_id = state.core_request.request_id
        state.num_unfinished = num_completions
        self._by_engine_id[request_id] = state, state.completions
        return [child_request_id(request_id, i) for i in range(num_completions)]

    def _add_readers(self, state: RequestState, params: SamplingParams) -> None:
        prompt_token_ids = state.core_request.prompt_token_ids
        if params.logprobs is not None:
            for completion in state.completions:
                completion.logprobs_reader = LogprobsReader(self._token_texts, prompt_token_ids)
        if params.prompt_logprobs is not None:
            state.prompt_logprobs = [None]
            state.num_missing_prompt_logprobs = len(prompt_token_ids) - 1
            state.prompt_logprobs_reader = LogprobsReader(self._token_texts, prompt_token_ids[:1])

    def set_record_token_times(self, is_wanted: bool) -> None:
        """Whether RequestMetrics.token_ts is filled."""
        self._records_token_times = is_wanted

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def unfinished_request_ids(self) -> list[str]:
        return list(self._requests)

    def abort_requests(self, request_ids: Iterable[str]) -> ProcessedOutputs:
        """Ends requests by user id. Unknown ids are ignored.

        The outputs carry the tokens received so far, with finish_reason "abort".
        """
        processed = ProcessedOutputs([], [])
        for request_id in request_ids:
            if (state := self._requests.get(request_id)) is not None:
                # with n > 1 this id aborts all unfinished completions
                processed.requests_to_abort.append(state.core_request.request_id)
                for completion in state.completions:
                    self._finish(state, completion, FinishReason.ABORT)
                if (output := self._make_output(state)) is not None:
                    processed.request_outputs.append(output)
        return processed

    # ------------------------------------------------------------ rows

    def process_outputs(self, outputs: EngineCoreOutputs) -> ProcessedOutputs:
        """Returns an output for each request with new tokens or a new state.

        Rows of requests that ended here and rows of an earlier engine are dropped.
        """
        if outputs.epoch < self._epochs.get(outputs.engine_index, self._first_epoch):
            self.num_dropped_rows += len(outputs.request_ids)
            return ProcessedOutputs([], [])
        self._epochs[outputs.engine_index] = outputs.epoch
        now = time.monotonic()
        self._engine_ts, self._clock_offset = outputs.timestamp, now - outputs.timestamp
        self._read_columns(outputs, now)
        finished = {column.row: column for column in outputs.finished}
        logprobs = {column.row: column for column in outputs.logprobs}
        processed = ProcessedOutputs([], [])
        changed: dict[str, RequestState] = {}  # by the user's id, in the order of their first row
        end = 0
        for row, (engine_id, first_index, num_tokens) in enumerate(
            zip(outputs.request_ids, outputs.first_indices, outputs.num_tokens, strict=True)
        ):
            start, end = end, end + num_tokens
            if (entry := self._by_engine_id.get(engine_id)) is None:
                continue
            state, completions = entry
            for completion in completions:
                if completion.finish_reason is not None:
                    continue
                # number of the row's tokens already received; negative if tokens are missing
                num_known = len(completion.token_ids) - first_index
                new_token_ids = outputs.token_ids[start + max(0, num_known) : end]
                if num_known < 0 or (new_token_ids and state.num_missing_prompt_logprobs):
                    num_used = self._end_at_gap(state, completion, num_known)
                else:
                    num_used = self._read_row(
                        state, completion, new_token_ids, finished.get(row), now
                    )
                    if row in logprobs:
                        _read_logprobs(completion, logprobs[row], num_known, num_used)
                if self._records_token_times:
                    _note_token_ts(state.metrics, outputs, end - len(new_token_ids), num_used)
                has_ended = completion.finish_reason is not None
                if has_ended and row not in finished:
                    processed.requests_to_abort.append(completion.engine_id)
                is_due = not state.is_final_only or state.num_unfinished == 0
                if is_due and (num_used or has_ended):
                    changed[state.request_id] = state
        for state in changed.values():
            if (output := self._make_output(state)) is not None:
                processed.request_outputs.append(output)
        return processed

    def _read_columns(self, outputs: EngineCoreOutputs, now: float) -> None:
        """Reads what belongs to a request, not to one of its completions."""
        ids, entries = outputs.request_ids, self._by_engine_id
        for timing in outputs.timings:
            engine_id = ids[timing.row]
            if engine_id in entries:
                take_timing(entries[engine_id][0], engine_id, timing)
        for row, num_cached_tokens in outputs.num_cached_tokens:
            if ids[row] in entries and entries[ids[row]][0].num_cached_tokens is None:
                state = entries[ids[row]][0]
                state.num_cached_tokens = state.metrics.num_cached_tokens = num_cached_tokens
        if outputs.prompt_logprobs or outputs.pooled:
            self._read_own_columns(outputs, now)

    def _read_own_columns(self, outputs: EngineCoreOutputs, now: float) -> None:
        """Reads the results of prompts: log-probabilities, and what pooling gave."""
        ids, entries = outputs.request_ids, self._by_engine_id
        for columns in outputs.prompt_logprobs:
            if ids[columns.row] in entries:
                _read_prompt_logprobs(entries[ids[columns.row]][0], columns)
        for pooled in outputs.pooled:
            if ids[pooled.row] in entries:
                state = entries[ids[pooled.row]][0]
                state.pooled = pooled.values
                state.metrics.first_token_time = state.clock_offset + now
                state.metrics.last_token_time = state.metrics.first_token_time

    def _read_row(
        self,
        state: RequestState,
        completion: CompletionState,
        new_token_ids: list[int],
        finished: Finished | None,
        now: float,
    ) -> int:
        """Returns the number of tokens that belong to the output: all, or those before a stop
        string.
        """
        num_used, stop = completion.detokenizer.update(
            new_token_ids, None if finished is None else finished.reason
        )
        if num_used:
            metrics = state.metrics
            metrics.last_token_time = state.clock_offset + now
            if metrics.first_token_time is None:
                metrics.first_token_time = metrics.last_token_time
            metrics.num_generation_tokens += num_used
            is_all = num_used == len(new_token_ids)
            completion.token_ids += new_token_ids if is_all else new_token_ids[:num_used]
        if stop is not None:
            self._finish(state, completion, FinishReason.STOP, stop_reason=stop)
        elif finished is not None:
            error = (finished.error, finished.parameter)
            self._finish(state, completion, finished.reason, finished.stop_reason, error)
        return num_used

    def _end_at_gap(self, state: RequestState, completion: CompletionState, num_known: int) -> int:
        """Ends a completion of which tokens are missing (`num_known` is negative), or
        log-probabilities of its prompt. Returns 0, the number of tokens that belong to the output.
        """
        if num_known < 0:
            num_tokens = len(completion.token_ids)
            missing = f"output tokens {num_tokens} to {num_tokens - num_known - 1}"
        else:
            first = len(state.core_request.prompt_token_ids) - state.num_missing_prompt_logprobs
            missing = f"log-probabilities of the prompt's tokens from {first} on"
        error = (f"{missing} did not arrive from the engine", None)
        self._finish(state, completion, FinishReason.ERROR, error=error)
        return 0

    def _finish(
        self,
        state: RequestState,
        completion: CompletionState,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: tuple[str | None, str | None] = (None, None),
    ) -> None:
        """Ends a completion if it has not ended. Removes the request with its last completion.

        `error`: the message, and the parameter that the engine refused.
        """
        if completion.finish_reason is not None:
            return
        if reason in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT):
            # emits the deferred text; has no effect if the row has already done so
            completion.detokenizer.update([], reason)
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        if reason is FinishReason.ERROR and state.error is None:
            state.error = error[0] or "the engine gave no reason"
            state.error_parameter = error[1]
        del self._by_engine_id[completion.engine_id]
        state.num_unfinished -= 1
        if state.num_unfinished == 0:
            state.metrics.finished_time = state.clock_offset + time.monotonic()
            # a stop string or an abort: the engine did not report the end
            if state.metrics.first_token_ts:
                state.metrics.last_token_ts = max(state.metrics.last_token_ts, self._engine_ts)
            self._by_engine_id.pop(state.core_request.request_id, None)
            del self._requests[state.request_id]
            self._on_finished(state, state.clock_offset + self._clock_offset)

    # ------------------------------------------------------------ outputs

    def _make_output(self, state: RequestState) -> AnyOutput | None:
        """Returns what the request's output_kind emits now, or None (FINAL_ONLY, or between two
        stream intervals).
        """
        if state.task is not None:
            return pooling_output(state)
        finished, is_delta = state.num_unfinished == 0, state.is_delta
        emitted = state.completions
        if len(emitted) > 1 or state.stream_interval > 1:  # otherwise the only completion is due
            due = [one for one in emitted if _is_due(one, state.stream_interval)]
            if not due and not finished:
                return None
            emitted = due if is_delta else emitted
        prompt_logprobs = None if state.are_prompt_logprobs_emitted else state.prompt_logprobs
        state.are_prompt_logprobs_emitted = is_delta
        # runs once per token of a stream: keyword arguments take twice as long
        return RequestOutput(
            state.request_id,
            state.prompt,
            state.core_request.prompt_token_ids,
            [_completion_output(completion, is_delta) for completion in emitted],
            finished,
            state.metrics,
            state.num_cached_tokens,
            prompt_logprobs,
            state.error,
            state.error_parameter,
            is_delta,
        )


def _is_due(completion: CompletionState, stream_interval: int) -> bool:
    """True for the first token, at the end, and every `stream_interval` tokens."""
    if completion.finish_reason is not None:
        return not completion.is_end_emitted
    num_new = len(completion.token_ids) - completion.num_emitted
    return num_new >= stream_interval or completion.num_emitted == 0 < num_new


def _completion_output(completion: CompletionState, is_delta: bool) -> CompletionOutput:
    start = completion.num_emitted if is_delta else 0
    finish_reason, has_logprobs = completion.finish_reason, completion.logprobs_reader is not None
    completion.num_emitted = len(completion.token_ids)
    completion.is_end_emitted = finish_reason is not None
    return CompletionOutput(
        completion.index,
        completion.detokenizer.take_delta() if is_delta else completion.detokenizer.text,
        completion.token_ids[start:],
        completion.cumulative_logprob if has_logprobs else None,
        completion.logprobs[start:] if has_logprobs else None,
        None if finish_reason is None else str(finish_reason),
        completion.stop_reason,
    )


def _read_logprobs(
    completion: CompletionState, columns: TokenLogprobs, first: int, num_tokens: int
) -> None:
    """Adds the log-probabilities of `num_tokens` tokens of the row, from `first` on."""
    if completion.logprobs_reader is None:
        return
    positions = completion.logprobs_reader.read(columns, first, first + num_tokens)
    completion.logprobs += positions
    # One addition per token: the sum must not depend on how rows split the tokens.
    for position in positions:
        completion.cumulative_logprob += next(iter(position.values())).logprob


def take_timing(state: RequestState, engine_id: str, timing: RequestTiming) -> None:
    """Brings the metrics up to date with the timing of a completion. A completion may continue
    on another engine, which received it later and knows nothing of the one before.
    """
    known = state.timings.setdefault(engine_id, [])
    if known and timing.queued_time <= known[-1].queued_time:
        known.pop()  # an engine sends all of its times again
    known.append(timing)
    every = [timing for timings in state.timings.values() for timing in timings]
    first_steps = [timing.scheduled_time for timing in every if timing.scheduled_time]
    first_tokens = [timing.first_token_time for timing in every if timing.first_token_time]
    metrics = state.metrics
    metrics.queued_ts = min(timing.queued_time for timing in every)
    metrics.scheduled_ts = min(first_steps, default=0.0)
    metrics.first_token_ts = min(first_tokens, default=0.0)
    metrics.last_token_ts = max(timing.last_token_time for timing in every)
    metrics.num_preemptions = sum(timing.num_preemptions for timing in every)
    metrics.num_recomputed_tokens = sum(timing.num_recomputed_tokens for timing in every)
    chunks = [chunk for timing in every for chunk in timing.prefill_chunks]
    metrics.prefill_chunks = sorted(chunks, key=lambda chunk: chunk[1])
    metrics.preemption_ts = sorted(ts for timing in every for ts in timing.preemption_times)


def _read_prompt_logprobs(state: RequestState, columns: PromptLogprobs) -> None:
    """Appends the positions that are new. A prompt that is recomputed after a preemption sends its
    positions again.
    """
    if state.prompt_logprobs is None or state.prompt_logprobs_reader is None:
        return
    num_known = len(state.prompt_logprobs) - columns.first_index
    num_rows = columns.token_ids.shape[0]
    if 0 <= num_known < num_rows:  # missing positions are detected with the first token
        state.prompt_logprobs += state.prompt_logprobs_reader.read(columns, num_known, num_rows)
        state.num_missing_prompt_logprobs -= num_rows - num_known


def _note_token_ts(
    metrics: RequestMetrics, outputs: EngineCoreOutputs, first: int, num_tokens: int
) -> None:
    """Notes when the engine made each of these tokens of `outputs`, from `first` on."""
    for i in range(first, first + min(num_tokens, MAX_TOKEN_TS - len(metrics.token_ts))):
        step = outputs.token_steps[i] if outputs.token_steps else None
        metrics.token_ts.append(outputs.timestamp if step is None else outputs.step_times[step])


def pooling_output(state: RequestState) -> PoolingRequestOutput:
    """The output of a finished request that pools."""
    output_type, result_type = KINDS.get(state.task or "", BY_TOKEN)
    pooled, reason = state.pooled, state.completions[0].finish_reason
    result = None
    if pooled is not None:
        import numpy as np  # takes 50 ms: only frontends of models that pool

        data = np.frombuffer(pooled.data, "<f4").reshape(pooled.shape)
        data.flags.writeable = False
        result = result_type(data)
    return output_type(
        state.request_id,
        state.prompt,
        state.core_request.prompt_token_ids,
        result,
        True,
        str(reason),
        state.metrics,
        state.num_cached_tokens,
        state.error,
        state.error_parameter,
    )
