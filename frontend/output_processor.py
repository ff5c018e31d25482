"""OutputProcessor: the engine's columns of token ids become the RequestOutputs of the requests they belong to.
May know: every request of this frontend, its journal, the tokenizer.
Must not know: sockets, the scheduler, who reads the outputs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..ipc.errors import InvalidParameterError
from ..ipc.messages import Array, EngineCoreOutputs, EngineCoreRequest, Finished, FinishReason, TokenLogprobs
from ..ipc.params import RequestOutputKind
from .detokenizer import IncrementalDetokenizer
from .input_processor import ProcessedRequest
from .outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from .tokenizer import Tokenizer


@dataclass(slots=True)
class RequestState:
    """One unfinished request. `core_request` and `token_ids` are its journal: with them another engine could go on where this one is.

    token_ids: every output token so far. delta_start: the first of them that no output has carried yet (DELTA only).
    """

    request_id: str
    prompt: str | None
    core_request: EngineCoreRequest
    detokenizer: IncrementalDetokenizer
    metrics: RequestMetrics
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    num_cached_tokens: int | None = None
    delta_start: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def output_kind(self) -> RequestOutputKind:
        return self.core_request.sampling_params.output_kind


@dataclass(slots=True)
class ProcessedOutputs:
    request_outputs: list[RequestOutput]
    requests_to_abort: list[str]  # the engine's ids of requests that ended here and go on there (a stop string, a gap)


@dataclass(slots=True)
class _Row:
    """One request's share of EngineCoreOutputs."""

    first_index: int
    token_ids: list[int]
    finished: Finished | None = None
    logprobs: TokenLogprobs | None = None
    num_cached_tokens: int | None = None


class OutputProcessor:
    """Owns the frontend's requests from add_request to their last output. Knows them by the engine's id, and by the user's for aborts."""

    def __init__(self, tokenizer: Tokenizer | None, epoch: int = 0):
        self._tokenizer = tokenizer
        self._epoch = epoch
        self._states: dict[str, RequestState] = {}  # by the engine's id
        self._engine_ids: dict[str, str] = {}  # by the user's id
        self._token_texts: dict[int, str] = {}  # of the tokens that appeared in log-probabilities
        self.num_dropped_rows = 0  # rows of an earlier engine; rows of requests that ended here are expected, and not counted

    def add_request(self, request: ProcessedRequest) -> None:
        """Raises InvalidParameterError when the user's id is that of an unfinished request."""
        core_request = request.core_request
        if request.request_id in self._engine_ids:
            raise InvalidParameterError("request_id", f"{request.request_id!r} is that of a request still running")
        params = core_request.sampling_params
        state = RequestState(
            request_id=request.request_id,
            prompt=request.prompt,
            core_request=core_request,
            detokenizer=IncrementalDetokenizer(self._tokenizer, core_request.prompt_token_ids, params),
            metrics=RequestMetrics(core_request.arrival_time),
            logprobs=None if params.logprobs is None else [],
            cumulative_logprob=None if params.logprobs is None else 0.0,
        )
        self._states[core_request.request_id] = state
        self._engine_ids[request.request_id] = core_request.request_id

    def has_unfinished_requests(self) -> bool:
        return bool(self._states)

    def num_unfinished_requests(self) -> int:
        return len(self._states)

    def unfinished_request_ids(self) -> list[str]:
        return list(self._engine_ids)

    def journal(self, request_id: str) -> tuple[EngineCoreRequest, list[int]]:
        """The request as the engine was sent it, and the output tokens since."""
        state = self._states[self._engine_ids[request_id]]
        return state.core_request, list(state.token_ids)

    def abort_requests(self, request_ids: Iterable[str]) -> ProcessedOutputs:
        """Ends requests by the user's ids; unknown ones are ignored. The outputs carry what there was, with finish_reason "abort"."""
        engine_ids = [self._engine_ids[request_id] for request_id in request_ids if request_id in self._engine_ids]
        outputs = [self._finish(self._states[engine_id], FinishReason.ABORT) for engine_id in engine_ids]
        return ProcessedOutputs(outputs, engine_ids)

    def process_outputs(self, outputs: EngineCoreOutputs) -> ProcessedOutputs:
        """The news for each request that has any. Rows of requests that ended here, or of an engine since replaced, are dropped."""
        if outputs.epoch < self._epoch:
            self.num_dropped_rows += len(outputs.request_ids)
            return ProcessedOutputs([], [])
        self._epoch = outputs.epoch
        now = time.time()
        processed = ProcessedOutputs([], [])
        for engine_id, row in zip(outputs.request_ids, _rows(outputs), strict=True):
            state = self._states.get(engine_id)
            if state is None:
                continue
            output = self._process_row(state, row, now)
            if output is not None:
                processed.request_outputs.append(output)
            if state.finish_reason is not None and row.finished is None:
                processed.requests_to_abort.append(engine_id)
        return processed

    def _process_row(self, state: RequestState, row: _Row, now: float) -> RequestOutput | None:
        num_known = len(state.token_ids) - row.first_index  # tokens of the row that came before
        if num_known < 0:
            problem = f"output tokens {len(state.token_ids)} to {row.first_index - 1} did not arrive from the engine"
            return self._finish(state, FinishReason.ERROR, error=problem)
        if row.num_cached_tokens is not None:
            state.num_cached_tokens = row.num_cached_tokens
        new_token_ids = row.token_ids[num_known:]
        finished = row.finished
        num_used, stop = state.detokenizer.update(new_token_ids, finished.reason if finished else None)
        if num_used:
            self._append(state, new_token_ids[:num_used], row.logprobs, num_known, now)
        if stop is not None:
            return self._finish(state, FinishReason.STOP, stop_reason=stop)
        if finished is not None:
            return self._finish(state, finished.reason, stop_reason=finished.stop_reason, error=finished.error)
        return self._make_output(state) if num_used else None

    def _append(self, state: RequestState, token_ids: list[int], logprobs: TokenLogprobs | None, num_known: int, now: float) -> None:
        state.token_ids += token_ids
        state.metrics.last_token_time = now
        if state.metrics.first_token_time is None:
            state.metrics.first_token_time = now
        if logprobs is not None and state.logprobs is not None:
            positions = self._read_logprobs(logprobs)[num_known : num_known + len(token_ids)]
            state.logprobs += positions
            state.cumulative_logprob += sum(next(iter(position.values())).logprob for position in positions)

    def _finish(
        self, state: RequestState, reason: FinishReason, *, stop_reason: int | str | None = None, error: str | None = None
    ) -> RequestOutput:
        """The last output; the request is forgotten."""
        if reason in (FinishReason.ABORT, FinishReason.ERROR):
            state.detokenizer.update([], reason)  # shows what was held back; harmless if the row did so already
        state.finish_reason, state.stop_reason, state.error = reason, stop_reason, error
        if reason is FinishReason.ERROR and error is None:
            state.error = "the engine gave no reason"
        state.metrics.finished_time = time.time()
        del self._states[state.core_request.request_id]
        del self._engine_ids[state.request_id]
        return self._make_output(state)

    def _make_output(self, state: RequestState) -> RequestOutput | None:
        """What the reader asked to see now: everything so far, the news, or (FINAL_ONLY, unfinished) nothing."""
        finished = state.finish_reason is not None
        kind = state.output_kind
        if kind == RequestOutputKind.FINAL_ONLY and not finished:
            return None
        is_delta = kind == RequestOutputKind.DELTA
        start = state.delta_start
        completion = CompletionOutput(
            index=0,
            text=state.detokenizer.take_delta() if is_delta else state.detokenizer.text,
            token_ids=state.token_ids[start:],
            cumulative_logprob=state.cumulative_logprob,
            logprobs=None if state.logprobs is None else state.logprobs[start:],
            finish_reason=str(state.finish_reason) if finished else None,
            stop_reason=state.stop_reason,
        )
        if is_delta:
            state.delta_start = len(state.token_ids)
        return RequestOutput(
            request_id=state.request_id,
            prompt=state.prompt,
            prompt_token_ids=state.core_request.prompt_token_ids,
            outputs=[completion],
            finished=finished,
            metrics=state.metrics,
            num_cached_tokens=state.num_cached_tokens,
            error=state.error,
            kind_is_delta=is_delta,
        )

    def _read_logprobs(self, columns: TokenLogprobs) -> list[PositionLogprobs]:
        """One dict per token. The sampled token comes first with its rank; the others are ranked by their column."""
        ids, logprobs, ranks = _numbers(columns.token_ids), _numbers(columns.logprobs), _numbers(columns.ranks)
        num_tokens, width = columns.token_ids.shape
        positions = []
        for i in range(num_tokens):
            row = slice(i * width, (i + 1) * width)
            candidates = list(zip(ids[row], logprobs[row], [ranks[i], *range(1, width)], strict=True))
            position = {token_id: Logprob(logprob, rank, self._token_text(token_id)) for token_id, logprob, rank in candidates[:1]}
            for token_id, logprob, rank in candidates[1:]:
                position.setdefault(token_id, Logprob(logprob, rank, self._token_text(token_id)))
            positions.append(position)
        return positions

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token_id not in self._token_texts:
            self._token_texts[token_id] = self._tokenizer.decode(token_id)
        return self._token_texts[token_id]


def _rows(outputs: EngineCoreOutputs) -> list[_Row]:
    """The columns, cut into rows."""
    rows, start = [], 0
    for first_index, num_tokens in zip(outputs.first_indices, outputs.num_tokens, strict=True):
        rows.append(_Row(first_index, outputs.token_ids[start : start + num_tokens]))
        start += num_tokens
    for finished in outputs.finished:
        rows[finished.row].finished = finished
    for logprobs in outputs.logprobs:
        rows[logprobs.row].logprobs = logprobs
    for index, num_cached_tokens in outputs.num_cached_tokens:
        rows[index].num_cached_tokens = num_cached_tokens
    return rows


def _numbers(array: Array) -> list:
    """An i4 or f4 array as a flat list, without numpy."""
    return memoryview(array.data).cast("B").cast({"i4": "i", "f4": "f"}[array.dtype]).tolist()
