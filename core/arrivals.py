"""A request's way in: checks, the wait for its grammar, and the scheduler or a refusal.

Must not know: steps, grammars, sockets, how rows reach clients. The frontend makes the same checks
with messages for users; those here are for clients that did not.

    add ──▶ check_request ──▶ (GrammarGate) ──▶ (the adapter is found) ──▶ Scheduler.add_request
                    └───────────────┴───────────────────┴───▶ an ERROR row
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from ..ipc.checks import is_finite, require_owner
from ..ipc.config import EngineConfig, resolved
from ..ipc.errors import InvalidParameterError
from ..ipc.messages import EngineCoreRequest, FinishReason
from ..ipc.params import (
    ALL_LOGPROBS,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
)
from .loras import LoraRegistry
from .output_rows import OutputRows
from .scheduling.results import write_end
from .scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)


class GrammarChecker(Protocol):
    """See Executor."""

    def check_grammar(
        self, params: StructuredOutputsParams, *, is_known: bool = False, owner: str = ""
    ) -> Future[None]: ...


class Arrivals:
    """Owns the gate of grammars, and answers the requests that the scheduler does not get."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        checker: GrammarChecker,
        rows: OutputRows,
        loras: LoraRegistry,
        *,
        wake: Callable[[], None],
        deliver: Callable[[], None] | None,
    ):
        """wake: see GrammarGate. deliver: sends the rows at once, if the host can."""
        self.gate = GrammarGate(wake)
        self._config = config
        self._scheduler = scheduler
        self._checker = checker
        self._rows = rows
        self._loras = loras
        self._deliver = deliver

    def add(self, request: EngineCoreRequest, client_index: int) -> None:
        """Queues a request.

        A request that cannot be served gets an ERROR row in the next outputs; nothing is raised.
        """
        try:
            check_request(request, self._config)
            if self._scheduler.is_in_use(request.request_id) or request.request_id in self.gate:
                raise InvalidParameterError(
                    "request_id", f"{request.request_id!r} is already in use"
                )
        except InvalidParameterError as refusal:
            return self._refuse(str(request.request_id), refusal, client_index)
        if request.structured_outputs is None:
            self._enter(request, client_index)
        else:
            self._check_grammar(request, client_index)

    def _check_grammar(self, request: EngineCoreRequest, client_index: int) -> None:
        arrival = self._scheduler.reserve_arrivals(request.num_completions)
        owner = f"{client_index} {request.owner}"
        is_known = bool(request.resume_tokens)
        grammar = resolved(request.structured_outputs)
        check = self._checker.check_grammar(grammar, is_known=is_known, owner=owner)
        self.gate.add(request, client_index, arrival, check)
        self.admit_checked()

    def admit_checked(self) -> None:
        """Passes requests with a valid grammar, and late ones, to the scheduler; answers the
        others.
        """
        for gated in self.gate.take():
            if (error := gated.error) is None:
                self._enter(gated.request, gated.client_index, gated.arrival, gated.queued_time)
                self.abort(gated.aborted_ids, gated.client_index)
                if self._deliver is not None:  # from here on steps compute it; see Resubmission
                    self._rows.of(gated.client_index).add_admitted(gated.request)
                    self._deliver()
            else:
                is_refusal = isinstance(error, InvalidParameterError)
                self._scheduler.counters.num_grammar_refusals += is_refusal
                self._refuse(gated.request.request_id, error, gated.client_index)

    def _enter(
        self,
        request: EngineCoreRequest,
        client_index: int,
        arrival: int | None = None,
        queued_time: float | None = None,
    ) -> None:
        """Passes a checked request to the scheduler, unless its adapter cannot be used."""
        adapter = None
        if request.lora_request is not None:
            try:
                adapter = self._loras.find(request.lora_request)
            except InvalidParameterError as refusal:
                return self._refuse(request.request_id, refusal, client_index)
        self._scheduler.add_request(request, client_index, arrival, queued_time, adapter)

    def _refuse(self, request_id: str, error: BaseException, client_index: int) -> None:
        """Answers a request that the scheduler does not get. An error that names no parameter is
        the engine's own.
        """
        parameter = error.parameter if isinstance(error, InvalidParameterError) else None
        if parameter is None:
            logger.error("the request %s failed: %s", request_id, error)
        rows = self._rows.of(client_index)
        rows.add(request_id, 0, [])
        rows.finish(FinishReason.ERROR, error=str(error), parameter=parameter)
        self._scheduler.counters.num_requests_refused += 1

    def abort(self, request_ids: list[str], client_index: int) -> None:
        """Ends this client's live requests among these; each gets an ABORT row.

        Other clients' and unknown ids are ignored.
        """
        if self.gate:
            # in the scheduler it ends like any other
            for gated in self.gate.abort(request_ids, client_index):
                self._scheduler.add_request(
                    gated.request, client_index, gated.arrival, gated.queued_time
                )
        for request in self._scheduler.abort_requests(request_ids, client_index):
            write_end(request, FinishReason.ABORT, self._rows, time.monotonic())

    def abort_all(self) -> None:
        """Ends every client's requests; each is answered as in `abort`."""
        by_client: dict[int, list[str]] = {}
        for request_id, request in self._scheduler.requests.items():
            by_client.setdefault(request.client_index, []).append(request_id)
        for gated in self.gate:
            by_client.setdefault(gated.client_index, []).append(gated.request.request_id)
        for client_index, request_ids in by_client.items():
            self.abort(request_ids, client_index)

    def drop_client(self, client_index: int) -> None:
        """The client has left or died: its requests end, and nobody is answered."""
        mine = [
            request_id
            for request_id, request in self._scheduler.requests.items()
            if request.client_index == client_index
        ]
        self._scheduler.counters.num_requests_orphaned += len(
            self._scheduler.abort_requests(mine, client_index)
        ) + self.gate.drop_client(client_index)

    def is_used_by(self, client_index: int) -> bool:
        """Whether the client has unfinished requests."""
        requests = self._scheduler.requests.values()
        return any(one.client_index == client_index for one in requests) or self.gate.is_used_by(
            client_index
        )

    def num_unheld_requests(self) -> int:
        """The number of unfinished requests, without those that a pause holds."""
        scheduler = self._scheduler
        num_unchecked = sum(not scheduler.is_held_back(gated.arrival) for gated in self.gate)
        return len(scheduler.requests) - len(scheduler.held) + num_unchecked

    @property
    def next_deadline(self) -> float | None:
        """When a request without its end becomes late, by time.monotonic()."""
        if not self.gate:
            return self._scheduler.next_deadline
        deadlines = self._scheduler.next_deadline, self.gate.next_deadline
        return min(filter(None, deadlines), default=None)


@dataclass(slots=True, eq=False)
class GatedRequest:
    """A request whose grammar is being checked."""

    request: EngineCoreRequest
    client_index: int
    arrival: int  # its place in the scheduler's order
    check: Future
    # the time spent here is part of its time in the queue
    queued_time: float = field(default_factory=lambda: time.monotonic())
    # completions to abort as soon as the scheduler has them
    aborted_ids: list[str] = field(default_factory=list)

    @property
    def is_late(self) -> bool:
        return bool(self.request.deadline) and self.request.deadline <= time.monotonic()

    @property
    def error(self) -> BaseException | None:
        """Why it ends, if so: an InvalidParameterError about its grammar, or a check that failed by
        itself, which is not the request's fault. None while the check runs.
        """
        if not self.check.done():
            return None
        if self.check.cancelled():
            return RuntimeError("the check of its grammar was cancelled")
        error = self.check.exception()
        if error is None or isinstance(error, InvalidParameterError):
            return error
        return RuntimeError(f"its grammar could not be checked: {error}")


class GrammarGate:
    """Requests whose grammar is being checked. Then they take their place in order of arrival.

        add ──▶ waiting ──(a check completes, in some thread)──▶ checked ──▶ take, between two steps
                        ──(its deadline passes)────────────────▶ late ─────▶

    There is no polling: a completed check calls `wake`, and the host waits no longer than until
    `next_deadline`. `wait` is for a caller that runs steps itself. Only completions of checks come
    from other threads than the one that runs steps.
    """

    def __init__(self, wake: Callable[[], None]):
        """wake: ends the wait of the engine's host; called from any thread."""
        self._wake = wake
        self._waiting: dict[str, GatedRequest] = {}  # in order of arrival
        self._checked: SimpleQueue[GatedRequest] = SimpleQueue()
        self._ready: deque[GatedRequest] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[GatedRequest]:
        return iter(self._waiting.values())

    def add(
        self, request: EngineCoreRequest, client_index: int, arrival: int, check: Future
    ) -> None:
        gated = GatedRequest(request, client_index, arrival, check)
        self._waiting[request.request_id] = gated
        if check.done():  # a known grammar: there is no wait to end
            self._ready.append(gated)
        else:
            check.add_done_callback(lambda _: self._on_checked(gated))

    def _on_checked(self, gated: GatedRequest) -> None:
        self._checked.put(gated)
        self._wake()

    @property
    def next_deadline(self) -> float | None:
        """By time.monotonic(), of the requests that wait here."""
        if not self._waiting:
            return None
        return min(
            (gated.request.deadline for gated in self if gated.request.deadline), default=None
        )

    def has_checked(self) -> bool:
        """Whether there is a request to take."""
        if not self._waiting:  # what is left of others is dropped with the next `take`
            return False
        return bool(self._ready) or not self._checked.empty() or any(g.is_late for g in self)

    def take(self) -> list[GatedRequest]:
        """Removes and returns the requests whose check is done, and those whose deadline has
        passed.
        """
        while not self._checked.empty():
            self._ready.append(self._checked.get())
        self._ready.extend(g for g in self if g.is_late and g not in self._ready)
        taken = [
            gated for gated in self._ready if self._waiting.get(gated.request.request_id) is gated
        ]
        self._ready.clear()
        for gated in taken:
            del self._waiting[gated.request.request_id]
        return taken

    def wait(self) -> None:
        """Blocks until there is a request to take. Call it only while a request waits here."""
        deadline = self.next_deadline
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self._ready:
            with contextlib.suppress(Empty):
                self._ready.append(self._checked.get(timeout=timeout_s))

    def abort(self, request_ids: list[str], client_index: int) -> list[GatedRequest]:
        """Removes this client's requests among `request_ids`.

        The abort of one of several completions is recorded.
        """
        taken = []
        for request_id in request_ids:
            gated = self._waiting.get(request_id)
            if gated is not None and gated.client_index == client_index:
                taken.append(self._waiting.pop(request_id))
            elif gated is None:
                parent = self._waiting.get(request_id.partition("_")[2])  # see child_request_id
                if parent is not None and parent.client_index == client_index:
                    parent.aborted_ids.append(request_id)
        return taken

    def drop_client(self, client_index: int) -> int:
        """The client is gone. Returns how many of its requests waited here; their checks are
        ignored.
        """
        mine = [
            request_id
            for request_id, gated in self._waiting.items()
            if gated.client_index == client_index
        ]
        for request_id in mine:
            del self._waiting[request_id]
        return len(mine)

    def is_used_by(self, client_index: int) -> bool:
        return any(gated.client_index == client_index for gated in self._waiting.values())

    def check_integrity(self, scheduled: Container[str]) -> None:
        """Raises AssertionError if a request is both here and in the scheduler, or waits for
        nothing.
        """
        both = [request_id for request_id in self._waiting if request_id in scheduled]
        forgotten = [
            gated.request.request_id
            for gated in self
            if gated.check.done() and not self.has_checked()
        ]
        if both or forgotten:
            raise AssertionError(
                f"waiting for their grammar and scheduled: {both}; forgotten: {forgotten}"
            )


def check_request(request: EngineCoreRequest, config: EngineConfig) -> None:
    """Refuses requests that the engine cannot serve.

    Raises InvalidParameterError, naming the parameter and its range.
    """
    _require(
        isinstance(request.request_id, str),
        "request_id",
        f"must be a string, got {request.request_id!r}",
    )
    params = request.params
    if isinstance(params, PoolingParams):
        _check_pooling(params, config)
    else:
        _require(
            isinstance(params, SamplingParams),
            "params",
            f"must be SamplingParams or PoolingParams, got {type(params).__name__}",
        )
        _require(
            config.model_config.runner != "pooling",
            "params",
            "must be PoolingParams: this engine runs with runner=pooling and generates no text",
        )
        _check_params(params, config)
    _check_token_ids(request, config)
    vocab_size = config.model_config.hf_config["vocab_size"]
    if request.structured_outputs is not None:
        _require(
            not request.sampling_params.ignore_eos,
            "ignore_eos",
            "must be False with structured_outputs, whose end is an end-of-sequence token",
        )
        _require(
            any(0 <= token_id < vocab_size for token_id in request.eos_token_ids),
            "structured_outputs",
            f"needs an end-of-sequence token between 0 and {vocab_size - 1}, the model's "
            f"vocabulary, to end with; got {request.eos_token_ids}",
        )
    _require(
        type(request.priority) is int, "priority", f"must be an integer, got {request.priority!r}"
    )
    _require(
        request.lora_request is None or config.lora_config.enable_lora,
        "lora_request",
        "needs an engine that was started with enable_lora",
    )
    _require(is_finite(request.deadline), "deadline", "must be a finite number")
    require_owner(request.owner, request.owner_weight)
    _require(
        request.cache_salt is None or isinstance(request.cache_salt, str),
        "cache_salt",
        "must be a string or None",
    )


def _check_pooling(params: PoolingParams, config: EngineConfig) -> None:
    pooling = config.model_config.pooling
    if pooling is None:
        raise InvalidParameterError(
            "params", "must be SamplingParams: the model generates text and cannot pool"
        )
    _require(
        params.task in pooling.tasks,
        "task",
        f"must be one of {', '.join(pooling.tasks)} for this model, got {params.task}",
    )


def _check_params(params: SamplingParams, config: EngineConfig) -> None:
    _require(params.seed is not None, "seed", "must be resolved by the frontend, got None")
    _require(
        params.max_tokens is not None, "max_tokens", "must be resolved by the frontend, got None"
    )
    vocab_size, cap = config.model_config.hf_config["vocab_size"], config.model_config.max_logprobs
    most = vocab_size if cap == ALL_LOGPROBS else min(cap, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        wanted = vocab_size if value == ALL_LOGPROBS else value or 0
        _require(
            wanted <= most,
            name,
            f"must be at most {most} (max_logprobs={cap}, a vocabulary of {vocab_size}), got "
            f"{value}",
        )
    bad_words = [token_id for token_ids in params.bad_words_token_ids for token_id in token_ids]
    _require(
        bool(bad_words) == bool(params.bad_words),
        "bad_words_token_ids",
        "must be resolved by the frontend: bad_words as token ids",
    )
    lists = (params.stop_token_ids, params.allowed_token_ids, params.logit_bias, bad_words)
    for name, token_ids in zip(
        ("stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words_token_ids"),
        lists,
        strict=True,
    ):
        if token_ids:
            _check_vocabulary(name, token_ids, vocab_size)


def _check_token_ids(request: EngineCoreRequest, config: EngineConfig) -> None:
    vocab_size, max_model_len = (
        config.model_config.hf_config["vocab_size"],
        resolved(config.model_config.max_model_len),
    )
    for name in ("prompt_token_ids", "resume_tokens", "eos_token_ids"):
        token_ids = getattr(request, name)
        _require(
            isinstance(token_ids, list) and set(map(type, token_ids)) <= {int},
            name,
            "must be a list of token ids",
        )
        if token_ids and name != "eos_token_ids":  # an id that no token has ends nothing
            _check_vocabulary(name, token_ids, vocab_size)
    num_prompt_tokens, num_resumed_tokens = (
        len(request.prompt_token_ids),
        len(request.resume_tokens),
    )
    is_one = request.num_completions == 1 or not num_resumed_tokens
    _require(
        is_one,
        "resume_tokens",
        "must be empty with n > 1: each child is resumed as a request of its own",
    )
    _require(num_prompt_tokens > 0, "prompt_token_ids", "must not be empty")
    if isinstance(request.params, PoolingParams):
        _require(
            num_prompt_tokens <= max_model_len and not num_resumed_tokens,
            "prompt_token_ids",
            f"must be at most max_model_len={max_model_len} tokens, and none in resume_tokens, got "
            f"{num_prompt_tokens} and {num_resumed_tokens}",
        )
        return
    _require(
        num_prompt_tokens + num_resumed_tokens < max_model_len,
        "prompt_token_ids",
        f"must leave room for an output token in max_model_len={max_model_len}, got "
        f"{num_prompt_tokens + num_resumed_tokens} tokens",
    )
    max_tokens = resolved(request.sampling_params.max_tokens)
    _require(
        num_resumed_tokens < max_tokens,
        "resume_tokens",
        f"must be fewer than max_tokens={max_tokens}, got {num_resumed_tokens}",
    )


def _check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Checks `token_ids`, which are not empty."""
    for extreme in (min(token_ids), max(token_ids)):
        if not 0 <= extreme < vocab_size:
            raise InvalidParameterError(
                name, f"token ids must be between 0 and {vocab_size - 1}, got {extreme}"
            )


def _require(holds: bool, parameter: str, problem: str) -> None:
    if not holds:
        raise InvalidParameterError(parameter, problem)
