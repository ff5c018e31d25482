"""OutputProcessor: converts EngineCoreOutputs into the RequestOutputs of the frontend's requests.

Must not know: sockets, the scheduler, the consumers of the outputs.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from ...ipc.errors import InvalidParameterError
from ...ipc.messages import (
    Array,
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    FinishReason,
    PromptLogprobs,
    RequestTiming,
    TokenLogprobs,
    child_request_id,
)
from ...ipc.params import PoolingParams, RequestOutputKind, child_seed
from ..outputs import CompletionOutput, RequestMetrics, RequestOutput
from ..pooling_outputs import AnyOutput, pooling_output
from ..text.detokenizer import IncrementalDetokenizer
from ..text.tokenizer import Tokenizer
from .input_processor import ProcessedRequest
from .logprobs import LogprobsReader, TokenTexts
from .request_state import NO_TEXT, CompletionState, RequestState


@dataclass(slots=True)
class ProcessedOutputs:
    request_outputs: list[AnyOutput]
    # engine ids of completions that ended here but still run in the engine (a stop string, missing
    # tokens)
    requests_to_abort: list[str]


@dataclass(slots=True)
class _Extras:
    """The optional parts of one row of EngineCoreOutputs. Most rows have none."""

    finished: Finished | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int | None = None
    pooled: Array | None = None


NO_EXTRAS = _Extras()
MAX_TOKEN_TS = 4096  # per request


class OutputProcessor:
    """Owns the frontend's requests from add_request to their last output.

    Rows are looked up by engine id, aborts by user id.
    """

    def __init__(self, tokenizer: Tokenizer | None, epoch: int = 0):
        self._tokenizer = tokenizer
        self._first_epoch = epoch
        self._epochs: dict[int, int] = {}  # the latest epoch by engine_index
        self._requests: dict[str, RequestState] = {}  # by user id
        # By engine id: the unfinished completions. With n > 1 the request's own engine id is also a
        # key, because the engine rejects the request under that id.
        self._by_engine_id: dict[str, tuple[RequestState, list[CompletionState]]] = {}
        self._token_texts = None if tokenizer is None else TokenTexts(tokenizer)
        # called with each finished request and the offset from the engine's clock to seconds since
        # 1970
        self.on_finished: Callable[[RequestState, float], None] | None = None
        self._engine_ts = 0.0  # the engine's clock when it sent its last outputs
        self._clock_offset = 0.0  # added to the engine's clock, gives time.monotonic()
        self.record_token_times = False  # fill RequestMetrics.token_ts
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
        if isinstance(core_request.params, PoolingParams):
            return self._add_pooling(request, core_request.params)
        params = core_request.sampling_params
        engine_ids = [core_request.request_id]
        if params.n > 1:
            engine_ids = [child_request_id(core_request.request_id, i) for i in range(params.n)]
        state = RequestState(
            request_id=request.request_id,
            prompt=request.prompt,
            core_request=core_request,
            clock_offset=request.clock_offset,
            metrics=RequestMetrics(
                core_request.arrival_time, num_prompt_tokens=len(core_request.prompt_token_ids)
            ),
            completions=[
                self._new_completion(i, engine_id, core_request)
                for i, engine_id in enumerate(engine_ids)
            ],
            is_delta=params.output_kind == RequestOutputKind.DELTA,
            is_final_only=params.output_kind == RequestOutputKind.FINAL_ONLY,
            stream_interval=params.stream_interval,
            num_unfinished=params.n,
        )
        if params.prompt_logprobs is not None:
            state.prompt_logprobs = [None]
            state.prompt_logprobs_reader = LogprobsReader(
                self._token_texts, core_request.prompt_token_ids[:1]
            )
        self._requests[request.request_id] = state
        for completion in state.completions:
            self._by_engine_id[completion.engine_id] = state, [completion]
        if params.n > 1:
            self._by_engine_id[core_request.request_id] = state, state.completions
        return state.metrics

    def _add_pooling(self, request: ProcessedRequest, params: PoolingParams) -> RequestMetrics:
        core_request = request.core_request
        completion = CompletionState(0, core_request.request_id, NO_TEXT, None)
        state = RequestState(
            request_id=request.request_id,
            prompt=request.prompt,
            core_request=core_request,
            clock_offset=request.clock_offset,
            metrics=RequestMetrics(
                core_request.arrival_time, num_prompt_tokens=len(core_request.prompt_token_ids)
            ),
            completions=[completion],
            is_delta=False,
            is_final_only=True,
            stream_interval=1,
            task=params.task,
        )
        self._requests[request.request_id] = state
        self._by_engine_id[completion.engine_id] = state, state.completions
        return state.metrics

    def _new_completion(
        self, index: int, engine_id: str, core_request: EngineCoreRequest
    ) -> CompletionState:
        params, prompt_token_ids = core_request.sampling_params, core_request.prompt_token_ids
        detokenizer = IncrementalDetokenizer(self._tokenizer, prompt_token_ids, params)
        reader = None
        if params.logprobs is not None:
            reader = LogprobsReader(self._token_texts, prompt_token_ids)
        return CompletionState(index, engine_id, detokenizer, reader)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    def unfinished_request_ids(self) -> list[str]:
        return list(self._requests)

    def journal(self, request_id: str) -> list[tuple[EngineCoreRequest, list[int]]]:
        """For each unfinished completion: its engine request and its output tokens so far.

        Another engine can continue the request from them. With n > 1 each completion becomes a
        request of its own with its own seed.
        """
        state = self._requests[request_id]
        request = state.core_request
        if state.task is not None:
            return [(request, [])]
        params, entries = request.sampling_params, []
        for completion in state.completions:
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

    def unfinished(self) -> list[tuple[EngineCoreRequest, list[int]]]:
        """The journals of all unfinished requests, in the order in which they were added."""
        return [entry for request_id in self._requests for entry in self.journal(request_id)]

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
        for timing in outputs.timings:
            self._note_timing(outputs.request_ids[timing.row], timing)
        processed = ProcessedOutputs([], [])
        changed: dict[str, RequestState] = {}  # by the user's id, in the order of their first row
        extras_of, end = _extras(outputs), 0
        token_ts = _token_ts(outputs) if self.record_token_times else None
        for i, (engine_id, first_index, num_tokens) in enumerate(
            zip(outputs.request_ids, outputs.first_indices, outputs.num_tokens, strict=True)
        ):
            start, end = end, end + num_tokens
            entry = self._by_engine_id.get(engine_id)
            if entry is None:
                continue
            state, completions = entry
            extras = extras_of.get(i, NO_EXTRAS)
            if extras.num_cached_tokens is not None and state.num_cached_tokens is None:
                state.num_cached_tokens = state.metrics.num_cached_tokens = extras.num_cached_tokens
            if extras.pooled is not None:
                state.pooled = extras.pooled
                state.metrics.first_token_time = state.clock_offset + now
                state.metrics.last_token_time = state.metrics.first_token_time
            if extras.prompt_logprobs is not None:
                self._read_prompt_logprobs(state, extras.prompt_logprobs)
            for completion in completions:
                if completion.finish_reason is not None:
                    continue
                # number of the row's tokens already received; negative if tokens are missing
                num_known = len(completion.token_ids) - first_index
                new_token_ids = outputs.token_ids[
                    start + num_known if num_known > 0 else start : end
                ]
                new_token_ts = (
                    None if token_ts is None else token_ts[end - len(new_token_ids) : end]
                )
                has_changed = self._process_row(
                    state, completion, new_token_ids, new_token_ts, num_known, extras, now
                )
                if has_changed and (not state.is_final_only or state.num_unfinished == 0):
                    changed[state.request_id] = state
                if completion.finish_reason is not None and extras.finished is None:
                    processed.requests_to_abort.append(completion.engine_id)
        for state in changed.values():
            if (output := self._make_output(state)) is not None:
                processed.request_outputs.append(output)
        return processed

    def _process_row(
        self,
        state: RequestState,
        completion: CompletionState,
        new_token_ids: list[int],
        new_token_ts: list[float] | None,
        num_known: int,
        extras: _Extras,
        now: float,
    ) -> bool:
        """Applies a row to the completion. Returns whether the completion changed."""
        if num_known < 0:
            num_tokens = len(completion.token_ids)
            missing = f"{num_tokens} to {num_tokens - num_known - 1}"
            problem = f"output tokens {missing} did not arrive from the engine"
            self._finish(state, completion, FinishReason.ERROR, error=problem)
            return True
        if (
            new_token_ids
            and state.prompt_logprobs is not None
            and len(state.prompt_logprobs) < len(state.core_request.prompt_token_ids)
        ):
            problem = (
                "log-probabilities of the prompt's tokens from "
                f"{len(state.prompt_logprobs)} on did not arrive from the engine"
            )
            self._finish(state, completion, FinishReason.ERROR, error=problem)
            return True
        finished = extras.finished
        num_used, stop = completion.detokenizer.update(
            new_token_ids, finished.reason if finished else None
        )
        if num_used:
            completion.token_ids += (
                new_token_ids if num_used == len(new_token_ids) else new_token_ids[:num_used]
            )
            metrics = state.metrics
            metrics.last_token_time = state.clock_offset + now
            metrics.num_generation_tokens += num_used
            if metrics.first_token_time is None:
                metrics.first_token_time = state.clock_offset + now
            if new_token_ts is not None and (room := MAX_TOKEN_TS - len(metrics.token_ts)):
                metrics.token_ts += new_token_ts[: min(num_used, room)]
            if extras.logprobs is not None and completion.logprobs_reader is not None:
                positions = completion.logprobs_reader.read(
                    extras.logprobs, num_known, num_known + num_used
                )
                completion.logprobs += positions
                # One addition per token: the sum must not depend on how rows split the tokens.
                for position in positions:
                    completion.cumulative_logprob += next(iter(position.values())).logprob
        if stop is not None:
            self._finish(state, completion, FinishReason.STOP, stop_reason=stop)
        elif finished is not None:
            self._finish(
                state,
                completion,
                finished.reason,
                stop_reason=finished.stop_reason,
                error=finished.error,
                error_parameter=finished.parameter,
            )
        return num_used > 0 or completion.finish_reason is not None

    def _read_prompt_logprobs(self, state: RequestState, columns: PromptLogprobs) -> None:
        """Appends the positions that are new. A prompt that is recomputed after a preemption sends
        its positions again.
        """
        if state.prompt_logprobs is None or state.prompt_logprobs_reader is None:
            return
        num_known = len(state.prompt_logprobs) - columns.first_index
        num_rows = columns.token_ids.shape[0]
        if 0 <= num_known < num_rows:  # missing positions are detected with the first token
            state.prompt_logprobs += state.prompt_logprobs_reader.read(columns, num_known, num_rows)

    def _finish(
        self,
        state: RequestState,
        completion: CompletionState,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        error_parameter: str | None = None,
    ) -> None:
        """Ends a completion if it has not ended. Removes the request with its last completion."""
        if completion.finish_reason is not None:
            return
        if reason in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT):
            # emits the deferred text; has no effect if the row has already done so
            completion.detokenizer.update([], reason)
        completion.finish_reason, completion.stop_reason = reason, stop_reason
        if reason is FinishReason.ERROR and state.error is None:
            state.error, state.error_parameter = (
                error or "the engine gave no reason",
                error_parameter,
            )
        del self._by_engine_id[completion.engine_id]
        state.num_unfinished -= 1
        if state.num_unfinished == 0:
            state.metrics.finished_time = state.clock_offset + time.monotonic()
            # a stop string or an abort: the engine did not report the end
            if state.metrics.first_token_ts:
                state.metrics.last_token_ts = max(state.metrics.last_token_ts, self._engine_ts)
            self._by_engine_id.pop(state.core_request.request_id, None)
            del self._requests[state.request_id]
            if self.on_finished is not None:
                self.on_finished(state, state.clock_offset + self._clock_offset)

    def _note_timing(self, engine_id: str, timing: RequestTiming) -> None:
        if (entry := self._by_engine_id.get(engine_id)) is not None:
            state, _ = entry
            state.timings.take(engine_id, timing)
            for name, value in state.timings.merged().items():
                setattr(state.metrics, name, value)

    # ------------------------------------------------------------ outputs

    def _make_output(self, state: RequestState) -> AnyOutput | None:
        """Returns what the request's output_kind emits now, or None (FINAL_ONLY, or between two
        stream intervals).
        """
        finished, is_delta = state.num_unfinished == 0, state.is_delta
        if state.is_final_only and not finished:
            return None
        if state.task is not None:
            return pooling_output(state)
        due = state.completions
        if len(due) > 1 or state.stream_interval > 1:  # otherwise the only completion is due
            due = [completion for completion in due if _is_due(completion, state.stream_interval)]
            if not due and not finished:
                return None
        prompt_logprobs = None if state.are_prompt_logprobs_emitted else state.prompt_logprobs
        state.are_prompt_logprobs_emitted = is_delta
        emitted = due if is_delta else state.completions
        outputs = (
            [_completion_output(emitted[0], is_delta)]
            if len(emitted) == 1
            else [_completion_output(completion, is_delta) for completion in emitted]
        )
        # runs once per token of a stream: keyword arguments take twice as long
        return RequestOutput(
            state.request_id,
            state.prompt,
            state.core_request.prompt_token_ids,
            outputs,
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


def _token_ts(outputs: EngineCoreOutputs) -> list[float]:
    """The timestamp of the step that produced each token, for all rows."""
    if not outputs.token_steps:
        return [outputs.timestamp] * len(outputs.token_ids)
    return [outputs.step_times[step] for step in outputs.token_steps]


def _extras(outputs: EngineCoreOutputs) -> dict[int, _Extras]:
    """The extras by row, for rows that have any."""
    extras: dict[int, _Extras] = defaultdict(_Extras)
    for finished in outputs.finished:
        extras[finished.row].finished = finished
    for logprobs in outputs.logprobs:
        extras[logprobs.row].logprobs = logprobs
    for prompt_logprobs in outputs.prompt_logprobs:
        extras[prompt_logprobs.row].prompt_logprobs = prompt_logprobs
    for row, num_cached_tokens in outputs.num_cached_tokens:
        extras[row].num_cached_tokens = num_cached_tokens
    for pooled in outputs.pooled:
        extras[pooled.row].pooled = pooled.values
    return extras
