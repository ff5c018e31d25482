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
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

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
from .image_checks import ImageLimits, image_problem
from .loras import LoraRegistry
from .output_rows import OutputRows
from .request import Request
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
        self._limits = RequestLimits.of(config)
        self._owners_by_name = config.scheduler_config.owners_by_name
        self._scheduler = scheduler
        self._checker = checker
        self._rows = rows
        self._loras = loras
        self._deliver = deliver
        self._pulls = config.cache_config.receives_kv
        self._max_model_len = resolved(config.model_config.max_model_len)

    def add(self, request: EngineCoreRequest, client_index: int) -> None:
        """Queues a request.

        A request that cannot be served gets an ERROR row in the next outputs; nothing is raised.
        """
        try:
            check_request(request, self._limits)
            request_id = request.request_id
            if self._scheduler.is_in_use(request_id) or request_id in self.gate.waiting:
                raise InvalidParameterError("request_id", f"{request_id!r} is already in use")
        except InvalidParameterError as refusal:
            return self._refuse(str(request.request_id), refusal, client_index)
        if request.structured_outputs is not None or self._pulls:
            self._wait(request, client_index)
        elif request.lora_request is not None:
            self._enter(request, client_index)
        else:
            self._scheduler.add_request(request, client_index)

    def _wait(self, request: EngineCoreRequest, client_index: int) -> None:
        """Queues a request once its grammar is checked and other engines have sent what they have.
        One that waits for neither enters at once.
        """
        pull, block_hashes = self._pull(request) if self._pulls else (None, [])
        check = self._check_grammar(request, client_index)
        if pull is not None:
            check = after_both(check, pull)
        if check is None:
            return self._enter(request, client_index, block_hashes=block_hashes)
        arrival = self._scheduler.reserve_arrivals(request.num_completions)
        self.gate.add(GatedRequest(request, client_index, arrival, check, pull, block_hashes))
        self.admit_checked()

    def _pull(self, message: EngineCoreRequest) -> tuple[Future[None] | None, list[bytes]]:
        """Has other engines send what they have computed of the prompt. None: it does not wait for
        them. Blocks of adapters mean something in one engine alone. Returns the hashes of its
        blocks, too, if they are known.
        """
        if message.lora_request is not None or isinstance(message.params, PoolingParams):
            return None, []
        request = Request(message, self._max_model_len)
        pull = self._scheduler.kv_cache_manager.fetch(request)
        return pull, request.block_hashes

    def _check_grammar(self, request: EngineCoreRequest, client_index: int) -> Future[None] | None:
        if request.structured_outputs is None:
            return None
        owner = f"{0 if self._owners_by_name else client_index} {request.owner}"
        is_known = bool(request.resume_tokens)
        return self._checker.check_grammar(
            request.structured_outputs, is_known=is_known, owner=owner
        )

    def admit_checked(self) -> None:
        """Passes requests with a valid grammar, and late ones, to the scheduler; answers the
        others.
        """
        for gated in self.gate.take():
            if (error := gated.error) is None:
                of_gate = gated.arrival, gated.queued_time, gated.block_hashes
                self._enter(gated.request, gated.client_index, *of_gate)
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
        block_hashes: Sequence[bytes] = (),
    ) -> None:
        """Passes a checked request to the scheduler, unless its adapter cannot be used."""
        adapter = None
        if request.lora_request is not None:
            try:
                adapter = self._loras.find(request.lora_request)
            except InvalidParameterError as refusal:
                return self._refuse(request.request_id, refusal, client_index)
        self._scheduler.add_request(
            request, client_index, arrival, queued_time, adapter, block_hashes
        )

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
        """The client has left or died: its requests end without an answer."""
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
    # of its blocks; the check waits for it, and it is cancelled when the request leaves before
    pull: Future | None = None
    block_hashes: list[bytes] = field(default_factory=list)  # if they are known
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

    def leave(self) -> None:
        """It waits no longer, so nothing is brought for it. Its check may be others', too."""
        if self.pull is not None:
            self.pull.cancel()


def after_both(check: Future[None] | None, pull: Future[None]) -> Future[None]:
    """The result of `check`, if there is one, once `pull` is done or was cancelled, too."""
    both: Future[None] = Future()
    if check is None:
        pull.add_done_callback(lambda _: both.set_result(None))
        return both

    def pass_on(_: Future[None]) -> None:
        error = RuntimeError("it was cancelled") if check.cancelled() else check.exception()
        if error is None:
            both.set_result(None)
        else:
            both.set_exception(error)

    pull.add_done_callback(lambda _: check.add_done_callback(pass_on))
    return both


class GrammarGate:
    """Requests whose grammar is being checked, or whose blocks other engines send. Then they take
    their place in order of arrival.

        add ──▶ waiting ──(a check completes, in some thread)──▶ checked ──▶ take, between two steps
                        ──(its deadline passes)────────────────▶ late ─────▶

    There is no polling: a completed check calls `wake`, and the host waits no longer than until
    `next_deadline`. `wait` is for a caller that runs steps itself. Only completions of checks come
    from other threads than the one that runs steps.
    """

    def __init__(self, wake: Callable[[], None]):
        """wake: ends the wait of the engine's host; called from any thread."""
        self._wake = wake
        self.waiting: dict[str, GatedRequest] = {}  # by id, in order of arrival
        self._checked: SimpleQueue[GatedRequest] = SimpleQueue()
        self._ready: deque[GatedRequest] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.waiting

    def __iter__(self) -> Iterator[GatedRequest]:
        return iter(self.waiting.values())

    def add(self, gated: GatedRequest) -> None:
        self.waiting[gated.request.request_id] = gated
        if gated.check.done():  # a known grammar: there is no wait to end
            self._ready.append(gated)
        else:
            gated.check.add_done_callback(lambda _: self._on_checked(gated))

    def _on_checked(self, gated: GatedRequest) -> None:
        self._checked.put(gated)
        self._wake()

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of the requests that wait here, by time.monotonic()."""
        if not self.waiting:
            return None
        return min(
            (gated.request.deadline for gated in self if gated.request.deadline), default=None
        )

    def has_checked(self) -> bool:
        """Whether there is a request to take."""
        if not self.waiting:  # what is left of others is dropped with the next `take`
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
            gated for gated in self._ready if self.waiting.get(gated.request.request_id) is gated
        ]
        self._ready.clear()
        for gated in taken:
            del self.waiting[gated.request.request_id]
            gated.leave()
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
            gated = self.waiting.get(request_id)
            if gated is not None and gated.client_index == client_index:
                taken.append(self.waiting.pop(request_id))
                gated.leave()
            elif gated is None:
                parent = self.waiting.get(request_id.partition("_")[2])  # see child_request_id
                if parent is not None and parent.client_index == client_index:
                    parent.aborted_ids.append(request_id)
        return taken

    def drop_client(self, client_index: int) -> int:
        """The client is gone. Returns how many of its requests waited here; their checks are
        ignored.
        """
        mine = [
            request_id
            for request_id, gated in self.waiting.items()
            if gated.client_index == client_index
        ]
        for request_id in mine:
            self.waiting.pop(request_id).leave()
        return len(mine)

    def is_used_by(self, client_index: int) -> bool:
        return any(gated.client_index == client_index for gated in self.waiting.values())

    def check_integrity(self, scheduled: Container[str]) -> None:
        """Raises AssertionError if a request is both here and in the scheduler, or waits for
        nothing.
        """
        both = [request_id for request_id in self.waiting if request_id in scheduled]
        forgotten = [
            gated.request.request_id
            for gated in self
            if gated.check.done() and not self.has_checked()
        ]
        if both or forgotten:
            raise AssertionError(
                f"waiting for their grammar and scheduled: {both}; forgotten: {forgotten}"
            )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may ask for, from the configuration."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int  # as configured; it may be ALL_LOGPROBS
    most_logprobs: int  # that a token may have
    pooling_tasks: tuple[str, ...] | None  # None: the model cannot pool
    only_pools: bool
    has_loras: bool
    images: ImageLimits | None  # None: the model reads no images

    @classmethod
    def of(cls, config: EngineConfig) -> RequestLimits:
        model = config.model_config
        vocab_size, most = model.hf_config["vocab_size"], model.max_logprobs
        return cls(
            vocab_size=vocab_size,
            max_model_len=resolved(model.max_model_len),
            max_logprobs=most,
            most_logprobs=vocab_size if most == ALL_LOGPROBS else min(most, vocab_size),
            pooling_tasks=None if model.pooling is None else tuple(model.pooling.tasks),
            only_pools=model.runner == "pooling",
            has_loras=config.lora_config.enable_lora,
            images=ImageLimits.of(config),
        )


class Rule(NamedTuple):
    """What must hold of a request, and the message for one of which it does not. A rule may rely on
    those before it.
    """

    parameter: str
    holds: Callable[[Any, RequestLimits], object]
    problem: Callable[[Any, RequestLimits], str]


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _in_vocabulary(token_ids: Collection[int] | None, limits: RequestLimits) -> bool:
    return not token_ids or (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size)


def _outside_vocabulary(token_ids: Collection[int], limits: RequestLimits) -> str:
    extremes = min(token_ids), max(token_ids)
    extreme = next(one for one in extremes if not 0 <= one < limits.vocab_size)
    return f"token ids must be between 0 and {limits.vocab_size - 1}, got {extreme}"


def _bad_words(request: Any) -> list[int]:
    return [token_id for ids in request.params.bad_words_token_ids or () for token_id in ids]


def _list_rule(name: str) -> Rule:
    value = attrgetter(name)
    return Rule(
        name, lambda r, _: _are_token_ids(value(r)), lambda r, _: "must be a list of token ids"
    )


def _vocabulary_rule(name: str, value: Callable[[Any], Any]) -> Rule:
    return Rule(
        name,
        lambda r, limits: _in_vocabulary(value(r), limits),
        lambda r, limits: _outside_vocabulary(value(r), limits),
    )


def _logprobs_rule(name: str) -> Rule:
    value = attrgetter(f"params.{name}")
    return Rule(
        name,
        lambda r, limits: (
            value(r) is None
            or (limits.vocab_size if value(r) == ALL_LOGPROBS else value(r)) <= limits.most_logprobs
        ),
        lambda r, limits: (
            f"must be at most {limits.most_logprobs} (max_logprobs={limits.max_logprobs}, a "
            f"vocabulary of {limits.vocab_size}), got {value(r)}"
        ),
    )


ID_RULES = (
    Rule(
        "request_id",
        lambda r, _: isinstance(r.request_id, str),
        lambda r, _: f"must be a string, got {r.request_id!r}",
    ),
)
SAMPLING_RULES = (
    Rule(
        "params",
        lambda r, _: isinstance(r.params, SamplingParams),
        lambda r, _: f"must be SamplingParams or PoolingParams, got {type(r.params).__name__}",
    ),
    Rule(
        "params",
        lambda _, limits: not limits.only_pools,
        lambda *_: (
            "must be PoolingParams: this engine runs with runner=pooling and generates no text"
        ),
    ),
    Rule(
        "seed",
        lambda r, _: r.params.seed is not None,
        lambda *_: "must be resolved by the frontend, got None",
    ),
    Rule(
        "max_tokens",
        lambda r, _: r.params.max_tokens is not None,
        lambda *_: "must be resolved by the frontend, got None",
    ),
    _logprobs_rule("logprobs"),
    _logprobs_rule("prompt_logprobs"),
    Rule(
        "bad_words_token_ids",
        lambda r, _: (
            not (r.params.bad_words or r.params.bad_words_token_ids)
            or bool(_bad_words(r)) == bool(r.params.bad_words)
        ),
        lambda *_: "must be resolved by the frontend: bad_words as token ids",
    ),
    _vocabulary_rule("stop_token_ids", lambda r: r.params.stop_token_ids),
    _vocabulary_rule("allowed_token_ids", lambda r: r.params.allowed_token_ids),
    _vocabulary_rule("logit_bias", lambda r: r.params.logit_bias),
    _vocabulary_rule(
        "bad_words_token_ids", lambda r: r.params.bad_words_token_ids and _bad_words(r)
    ),
)
POOLING_RULES = (
    Rule(
        "params",
        lambda _, limits: limits.pooling_tasks is not None,
        lambda *_: "must be SamplingParams: the model generates text and cannot pool",
    ),
    Rule(
        "task",
        lambda r, limits: r.params.task in limits.pooling_tasks,
        lambda r, limits: (
            f"must be one of {', '.join(limits.pooling_tasks)} for this model, got {r.params.task}"
        ),
    ),
)
TOKEN_RULES = (
    _list_rule("prompt_token_ids"),
    _vocabulary_rule("prompt_token_ids", lambda r: r.prompt_token_ids),
    _list_rule("resume_tokens"),
    _vocabulary_rule("resume_tokens", lambda r: r.resume_tokens),
    _list_rule("eos_token_ids"),  # an id that no token has ends nothing
    Rule(
        "resume_tokens",
        lambda r, _: not r.resume_tokens or r.num_completions == 1,
        lambda *_: "must be empty with n > 1: each child is resumed as a request of its own",
    ),
    Rule("prompt_token_ids", lambda r, _: r.prompt_token_ids, lambda *_: "must not be empty"),
)
POOLED_LENGTH_RULES = (
    Rule(
        "prompt_token_ids",
        lambda r, limits: len(r.prompt_token_ids) <= limits.max_model_len and not r.resume_tokens,
        lambda r, limits: (
            f"must be at most max_model_len={limits.max_model_len} tokens, and none in "
            f"resume_tokens, got {len(r.prompt_token_ids)} and {len(r.resume_tokens)}"
        ),
    ),
)
SAMPLED_LENGTH_RULES = (
    Rule(
        "prompt_token_ids",
        lambda r, limits: len(r.prompt_token_ids) + len(r.resume_tokens) < limits.max_model_len,
        lambda r, limits: (
            f"must leave room for an output token in max_model_len={limits.max_model_len}, got "
            f"{len(r.prompt_token_ids) + len(r.resume_tokens)} tokens"
        ),
    ),
    Rule(
        "resume_tokens",
        lambda r, _: len(r.resume_tokens) < r.params.max_tokens,
        lambda r, _: (
            f"must be fewer than max_tokens={r.params.max_tokens}, got {len(r.resume_tokens)}"
        ),
    ),
    Rule(
        "ignore_eos",
        lambda r, _: r.params.structured_outputs is None or not r.params.ignore_eos,
        lambda *_: "must be False with structured_outputs, whose end is an end-of-sequence token",
    ),
    Rule(
        "structured_outputs",
        lambda r, limits: (
            r.params.structured_outputs is None
            or any(0 <= token_id < limits.vocab_size for token_id in r.eos_token_ids)
        ),
        lambda r, limits: (
            f"needs an end-of-sequence token between 0 and {limits.vocab_size - 1}, the model's "
            f"vocabulary, to end with; got {r.eos_token_ids}"
        ),
    ),
)
COMMON_RULES = (
    Rule(
        "priority",
        lambda r, _: type(r.priority) is int,
        lambda r, _: f"must be an integer, got {r.priority!r}",
    ),
    Rule(
        "lora_request",
        lambda r, limits: r.lora_request is None or limits.has_loras,
        lambda *_: "needs an engine that was started with enable_lora",
    ),
    Rule(
        "images",
        lambda r, limits: not (r.images and image_problem(r, limits.images)),
        lambda r, limits: image_problem(r, limits.images),
    ),
    Rule("deadline", lambda r, _: is_finite(r.deadline), lambda *_: "must be a finite number"),
    Rule(
        "cache_salt",
        lambda r, _: r.cache_salt is None or isinstance(r.cache_salt, str),
        lambda *_: "must be a string or None",
    ),
)
GENERATING = (*ID_RULES, *SAMPLING_RULES, *TOKEN_RULES, *SAMPLED_LENGTH_RULES, *COMMON_RULES)
POOLING = (*ID_RULES, *POOLING_RULES, *TOKEN_RULES, *POOLED_LENGTH_RULES, *COMMON_RULES)


def check_request(request: EngineCoreRequest, limits: RequestLimits) -> None:
    """Refuses requests that the engine cannot serve.

    Raises InvalidParameterError, naming the parameter and its range.
    """
    for rule in POOLING if isinstance(request.params, PoolingParams) else GENERATING:
        if not rule.holds(request, limits):
            raise InvalidParameterError(rule.parameter, rule.problem(request, limits))
    require_owner(request.owner, request.owner_weight)
