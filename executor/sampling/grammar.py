"""Structured output: finds the tokens that each request's grammar allows, step by step.

Must not know: what a schema means, the model, why a row was scheduled.

    arrival      check: a process of grammar_check.py tries the grammar; a thread compiles it
    slot entry   enter: a copy of the compiled matcher
    each step    start: matchers take the new tokens and compute the next masks in a thread,
                        while the model runs
                 look_ahead: so do those after each draft that the model verifies
                 apply: waits for the masks and writes -inf where they have no bit

A matcher depends only on its request's tokens, so events between steps (a preemption, several
tokens at once, a discarded sample) need no special case: `start` reads the tokens of the slot. A
finished grammar allows only end-of-sequence tokens, also after one was taken, and the request's
other parameters apply after it: if min_tokens forbids these too, no token is left and the request
ends with an error. A matcher that exceeds llguidance's limits, or that fails in any other way, is
an error of its request too, and allows no token: no row with a grammar is sampled without a mask.

The cost of some grammars grows with the text. The CPU time of each request's matcher is measured
in the thread that runs it, so that other programs do not count, and `take_costs` reports it to the
core, which ends a request that takes too much. Nothing here depends on these times: ranks decide
the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from llguidance import LLMatcher

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidParameterError
from ...ipc.params import StructuredOutputsParams
from ...ipc.step_messages import NewRequestData, RowError, RowRefusal
from .change_list import ChangeList
from .grammar_check import COMPILE_STACK_BYTES, CompilerSettings, GrammarCheck
from .grammar_compiler import GrammarCompiler, is_dead_end, normalize, refusal, shorten
from .grammar_queue import GrammarQueue

if TYPE_CHECKING:
    from ..input_batch import InputBatch

logger = logging.getLogger(__name__)

NUM_CHECKS = 2  # processes; one slow grammar does not block the others
# compiled grammars kept, least recently used evicted first; usually less than 0.1 MB each
MAX_COMPILED = 512
# total size of their texts; compiled they are up to a hundred times as large
MAX_COMPILED_BYTES = 4 * 2**20
MAX_VERDICTS = 4096  # results of checks kept
MAX_FORCED_TOKENS = 128  # in one step: their matcher's time is not limited within it
REPORTED_S = 0.001  # CPU time of one request's matcher that is worth telling the core
MAX_MASK_THREADS = 4


@dataclass(slots=True)
class SlotGrammar:
    """The grammar of one request. Used by the mask thread from the slot's first `start` on."""

    params: StructuredOutputsParams  # normalized
    eos_token_ids: list[int]
    num_consumed: int  # of the slot's tokens, prompt included
    # no other parameter of the request masks tokens or wants log-probabilities, so a forced token
    # would be sampled in any case
    can_jump: bool
    matcher: LLMatcher | None = None  # None: not copied yet
    # An end-of-sequence token was taken. What is sampled in steps that have begun is dropped.
    is_ended: bool = False
    error: RowError | None = None
    unreported_s: float = 0.0  # CPU time of the matcher that the core does not know
    # tokens that may follow, with the mask after each [num_mask_words] i32; see look_ahead
    ahead: deque[tuple[int, np.ndarray]] = field(default_factory=deque)
    mask: np.ndarray | None = None  # the one after the last token, if look_ahead has found it

    def advance(self, token_ids: list[int]) -> bool:
        """Takes the tokens; returns whether the matcher can go on."""
        for token_id in token_ids:
            expected, self.mask = self.ahead.popleft() if self.ahead else (None, None)
            if expected != token_id:
                self.ahead.clear()
                self.mask = None
        if self.is_ended or self.error is not None or self.matcher is None:
            return False
        self.is_ended = not set(token_ids).isdisjoint(self.eos_token_ids)
        if not self.is_ended and not self.matcher.consume_tokens(token_ids):
            self.error = _problem_of(self.matcher)
        return not self.is_ended and self.error is None

    def look_ahead(self, drafts: list[int], num_mask_words: int) -> Iterator[np.ndarray]:
        """Finds the mask after each of the drafts, which the grammar allows. Yields it to be
        finished. At the end the matcher is where it was.
        """
        matcher, num_taken = self.matcher, 0
        self.ahead.clear()
        if matcher is None or self.is_ended or self.error is not None:
            return
        try:
            for token_id in drafts:
                if token_id in self.eos_token_ids or not matcher.consume_token(token_id):
                    return
                num_taken += 1
                words = np.zeros(num_mask_words, np.int32)
                matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
                yield words
                self.ahead.append((token_id, words))
        finally:
            if num_taken and not matcher.rollback(num_taken):
                self.error = _problem_of(matcher)

    def fail(self, error: Exception) -> None:
        """Notes an error that is not the request's fault."""
        logger.error("a grammar failed", exc_info=error)
        self.error = f"its grammar failed: {type(error).__name__}"

    @contextmanager
    def timed(self) -> Iterator[None]:
        """A context in which the calling thread works for this matcher alone."""
        start = time.thread_time()
        try:
            yield
        finally:
            self.unreported_s += time.thread_time() - start


class Grammars:
    """The logits stage that applies grammars (see logits_stages.py).

    Its threads and processes start with the first grammar.
    """

    parameter = "structured_outputs"

    def __init__(self, config: EngineConfig, ops: Any, vocab_size: int):
        model_config = config.model_config
        eos = model_config.hf_config.get("eos_token_id")
        eos_token_id = next(iter(eos), None) if isinstance(eos, list) else eos
        directory = (
            None
            if model_config.skip_tokenizer_init
            else model_config.tokenizer or model_config.model
        )
        self.settings = (
            None if directory is None else CompilerSettings(directory, vocab_size, eos_token_id)
        )
        # None: the engine runs without a tokenizer, and requests with a grammar are refused
        self.compiler = (
            None if directory is None else GrammarCompiler(directory, vocab_size, eos_token_id)
        )
        self.ops = ops
        scheduling = config.scheduler_config
        self.max_num_seqs = scheduling.max_num_seqs
        # Jump-forward needs the last step's tokens, which overlapped and multi-step runs do not
        # know yet.
        is_plain = not scheduling.async_scheduling and scheduling.num_scheduler_steps <= 1
        self.jumps = (
            scheduling.enable_jump_forward and is_plain and not model_config.logits_processors
        )
        self._slots: dict[int, SlotGrammar] = {}
        # by slot [max_num_seqs, num_mask_words], allocated with the first grammar
        self._bitmask = np.zeros((0, 0), np.int32)
        self._masks: Future | None = None  # of the step that was started last
        self._ahead: dict[int, Future] = {}  # of slots, until their matchers are used again
        # slot -> num_tokens for which its mask is computed or being computed
        self._started: dict[int, int] = {}
        self._verdicts: OrderedDict[bytes, Future] = OrderedDict()
        # with the size of its text
        self._compiled: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()
        self._compiled_bytes = 0
        self._compiled_lock = threading.Lock()
        self._unchecked: dict[bytes, tuple[Future[None], StructuredOutputsParams, bool]] = {}
        self._queue = GrammarQueue(NUM_CHECKS)
        self._checks: SimpleQueue[GrammarCheck] = SimpleQueue()
        self._all_checks: list[GrammarCheck] = []
        self._check_pool: ThreadPoolExecutor | None = None
        self._mask_pool: ThreadPoolExecutor | None = None
        self._num_mask_threads = max(1, min(MAX_MASK_THREADS, torch.get_num_threads()))
        self._mask_helpers: ThreadPoolExecutor | None = None  # beside the thread of masks

    # ------------------------------------------------------------ before a request is scheduled

    def check(
        self, params: StructuredOutputsParams, *, is_known: bool = False, owner: str = ""
    ) -> Future[None]:
        """Returns a future that completes when the grammar is compiled.

        The future raises the InvalidParameterError of an invalid grammar, and another exception if
        the check itself failed. One thread calls it.

        Equal grammars share one check, whose result is kept for a while. is_known: it compiled in
        another engine, within the limits, so it needs no process of its own here. Owners take
        turns (see grammar_queue.py).
        """
        try:
            self._require_compiler()
            params = normalize(params)
        except InvalidParameterError as error:
            future: Future[None] = Future()
            future.set_exception(error)
            return future
        key = key_of(params)
        known = self._verdicts.get(key)
        if known is None or (known.done() and _is_failure(known)):
            known = self._verdicts[key] = Future()
            self._unchecked[key] = known, params, is_known
        if key in self._unchecked:  # perhaps it waits for the turn of another owner, too
            self._begin_check(key, owner)
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return known

    def _require_compiler(self) -> GrammarCompiler:
        if self.compiler is None:
            raise refusal("needs the tokenizer: this engine runs with skip_tokenizer_init=True")
        return self.compiler

    def _begin_check(self, key: bytes, owner: str) -> None:
        if self._check_pool is None and self.settings is not None:
            self._check_pool = ThreadPoolExecutor(NUM_CHECKS, "quire-grammar-check")
            self._all_checks = [GrammarCheck(self.settings) for _ in range(NUM_CHECKS)]
            for check in self._all_checks:
                self._checks.put(check)
            # loads it while the first check's process does so too
            compiler = self._require_compiler()
            _submit(self._check_pool, lambda: compiler.tokenizer)
        self._queue.add(owner, key)
        _submit(self._check_pool, self._check_waiting)

    def _check_waiting(self) -> None:
        """Runs in a thread of the pool, which is also the parent of the process that it starts."""
        while (taken := self._queue.take()) is not None:
            owner, key, is_slow = taken
            check, seconds = self._checks.get(), 0.0
            try:
                if (unchecked := self._unchecked.pop(key, None)) is not None:
                    before = check.spent_s
                    self._check(check, key, *unchecked)
                    seconds = check.spent_s - before
            finally:
                self._checks.put(check)
                self._queue.done(owner, seconds, is_slow)

    def _check(
        self,
        check: GrammarCheck,
        key: bytes,
        future: Future[None],
        params: StructuredOutputsParams,
        is_known: bool,
    ) -> None:
        try:
            self._compile(key, params if is_known else check.check(params))
        except InvalidParameterError as error:
            # A new exception: the traceback of this one would keep the whole grammar alive as long
            # as the result is kept.
            future.set_exception(InvalidParameterError(error.parameter, error.problem))
        except BaseException as error:
            logger.error("a grammar could not be checked: %s: %s", type(error).__name__, error)
            future.set_exception(error)
        else:
            future.set_result(None)

    def _compile(self, key: bytes, params: StructuredOutputsParams) -> LLMatcher:
        """Returns the matcher, cached or newly compiled. Runs in a thread with a deep stack."""
        with self._compiled_lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key][0]
        matcher = self._require_compiler().compile(params)
        with self._compiled_lock:
            if key not in self._compiled:  # else another thread was as fast
                size = len(msgspec.msgpack.encode(params))
                self._compiled[key] = matcher, size
                self._compiled_bytes += size
            while len(self._compiled) > MAX_COMPILED or self._compiled_bytes > MAX_COMPILED_BYTES:
                self._compiled_bytes -= self._compiled.popitem(last=False)[1][1]
        return matcher

    # ------------------------------------------------------------ slots

    def enter(self, request: NewRequestData) -> bool:
        params = request.sampling_params.structured_outputs
        if params is None:
            return False
        compiler = self._require_compiler()
        if not len(self._bitmask):
            self._bitmask = np.zeros((self.max_num_seqs, compiler.num_mask_words), np.int32)
            self._mask_pool = ThreadPoolExecutor(1, "quire-grammar-masks")
            self._mask_helpers = ThreadPoolExecutor(self._num_mask_threads, "quire-grammar-helper")
        count = request.num_prompt_tokens
        eos_token_ids = [
            token_id for token_id in request.eos_token_ids if 0 <= token_id < compiler.vocab_size
        ]
        sampling = request.sampling_params
        is_alone = not (
            sampling.min_tokens
            or sampling.bad_words_token_ids
            or sampling.allowed_token_ids is not None
        )
        can_jump = self.jumps and is_alone and sampling.logprobs is None
        self._slots[request.slot] = SlotGrammar(normalize(params), eos_token_ids, count, can_jump)
        return True

    def leave(self, slot: int) -> None:
        del self._slots[slot]
        self._started.pop(slot, None)
        self._ahead.pop(slot, None)

    # ------------------------------------------------------------ the step

    def start(self, slots: np.ndarray, batch: InputBatch) -> None:
        """Starts computing the masks of those of `slots` [R] that have a grammar; returns at
        once.
        """
        if not self._slots:
            return
        work = []
        for slot in slots.tolist():
            grammar = self._slots.get(slot)
            if grammar is None:
                continue
            num_tokens = int(batch.num_tokens[slot])
            if self._started.get(slot) != num_tokens:
                self._started[slot] = num_tokens
                if slot in self._ahead or grammar.ahead:
                    self._take_tokens(slot, grammar, batch)
                if grammar.num_consumed == num_tokens and grammar.mask is not None:
                    self._bitmask[slot] = grammar.mask
                    continue
                token_ids = batch.token_ids[slot, grammar.num_consumed : num_tokens].tolist()
                work.append((slot, grammar, token_ids))
                grammar.num_consumed = num_tokens
        if work:
            self._masks = _submit(self._mask_pool, self._find_masks, work)

    def look_ahead(self, slots: list[int], drafts: list[np.ndarray]) -> None:
        """Starts computing the masks after each of the drafts, which grammars allow, of those of
        `slots` that have a grammar; returns at once. `start` was called for these slots.
        """
        work = {
            slot: draft.tolist()
            for slot, draft in zip(slots, drafts)
            if len(draft) and slot in self._slots
        }
        if work:
            grammars = [(self._slots[slot], draft) for slot, draft in work.items()]
            looking = _submit(self._mask_pool, self._find_ahead, grammars)
            self._ahead |= dict.fromkeys(work, looking)

    def _take_tokens(self, slot: int, grammar: SlotGrammar, batch: InputBatch) -> bool:
        """Takes the slot's new tokens here and not in the mask thread, as soon as that has no work
        for the slot. Returns whether the grammar can go on.
        """
        for begun in (self._masks, self._ahead.pop(slot, None)):
            if begun is not None:
                begun.result()
        if grammar.matcher is None:
            return False
        end = int(batch.num_tokens[slot])
        token_ids = batch.token_ids[slot, grammar.num_consumed : end].tolist()
        grammar.num_consumed = end
        try:
            with grammar.timed():
                return grammar.advance(token_ids)
        except Exception as error:
            grammar.fail(error)
            return False

    def apply(
        self, logits: torch.Tensor, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> dict[int, RowError]:
        """See LogitsStage. Waits for what `start` began, or begins it."""
        bitmask = torch.from_numpy(self._masks_of(slots, batch)).to(logits.device)
        self.ops.apply_grammar_bitmask(logits, bitmask, torch.from_numpy(rows).to(logits.device))
        return self._errors_of(rows, slots)

    def describe(
        self, changes: ChangeList, rows: np.ndarray, slots: np.ndarray, batch: InputBatch
    ) -> dict[int, RowError]:
        """See LogitsStage. Waits as apply does."""
        for row, words in zip(rows.tolist(), self._masks_of(slots, batch)):
            changes.allow_words(row, words)
        return self._errors_of(rows, slots)

    def _masks_of(self, slots: np.ndarray, batch: InputBatch) -> np.ndarray:
        """[R, num_words] i32"""
        self.start(slots, batch)
        if self._masks is not None:
            self._masks.result()
        return self._bitmask[slots]

    def _errors_of(self, rows: np.ndarray, slots: np.ndarray) -> dict[int, RowError]:
        grammars = [self._slots[slot] for slot in slots.tolist()]
        return {
            int(row): grammar.error
            for row, grammar in zip(rows, grammars)
            if grammar.error is not None
        }

    def jump(self, slots: np.ndarray, batch: InputBatch) -> dict[int, list[int]]:
        """Appends the tokens that grammars force after the tokens just sampled; returns them by
        slot.

        A mask with one bit determines the token whatever the logits, so it needs no model run. Its
        keys and values are computed with the next step's token, as a small chunk. Also starts
        computing the masks after it. `slots` [R] have just sampled.
        """
        if not self._slots or not self.jumps:
            return {}
        forced = {}
        for slot in slots.tolist():
            grammar = self._slots.get(slot)
            if (
                grammar is not None
                and grammar.can_jump
                and (token_ids := self._forced_tokens(slot, grammar, batch))
            ):
                forced[slot] = token_ids
        self.start(slots, batch)
        return forced

    @property
    def has_any(self) -> bool:
        """Whether a slot has a grammar."""
        return bool(self._slots)

    def num_allowed(self, slot: int, token_ids: np.ndarray, batch: InputBatch) -> int:
        """How many of the tokens that may follow this slot's, from the first one on, its grammar
        allows; all without a grammar.
        """
        grammar = self._slots.get(slot)
        if grammar is None:
            return len(token_ids)
        if grammar.matcher is None:  # the mask thread makes it
            self.start(np.array([slot]), batch)
        if not self._take_tokens(slot, grammar, batch) or grammar.matcher is None:
            return 0
        with grammar.timed():
            return grammar.matcher.validate_tokens(token_ids.tolist())

    def take_costs(self, slots: Iterable[int]) -> dict[int, float]:
        """The CPU time in seconds that the matchers of `slots` have taken since this was last
        asked, where it is noticeable.
        """
        costs = {}
        for slot in slots if self._slots else ():
            grammar = self._slots.get(int(slot))
            if grammar is not None and grammar.unreported_s > REPORTED_S:
                costs[int(slot)], grammar.unreported_s = grammar.unreported_s, 0.0
        return costs

    def _forced_tokens(self, slot: int, grammar: SlotGrammar, batch: InputBatch) -> list[int]:
        """Runs here and not in the mask thread, which has no work for this slot: its last mask was
        just used.
        """
        try:
            with grammar.timed():
                return self._find_forced(slot, grammar, batch)
        except Exception as error:
            grammar.fail(error)
            return []

    def _find_forced(self, slot: int, grammar: SlotGrammar, batch: InputBatch) -> list[int]:
        start, room = int(batch.num_tokens[slot]), batch.token_ids.shape[1]
        can_go_on = grammar.advance(batch.token_ids[slot, grammar.num_consumed : start].tolist())
        grammar.num_consumed = start
        if not can_go_on:
            return []
        matcher = grammar.matcher
        assert matcher is not None  # it was there for the last mask
        token_ids = matcher.compute_ff_tokens()[: min(room - start, MAX_FORCED_TOKENS)]
        # A grammar may name an end-of-sequence token: the output ends with it.
        ends = (i for i, token_id in enumerate(token_ids) if token_id in grammar.eos_token_ids)
        token_ids = token_ids[: next(ends, room) + 1]
        if token_ids and not grammar.advance(token_ids) and not grammar.is_ended:
            return []
        if (
            not grammar.is_ended
            and len(grammar.eos_token_ids) == 1
            and start + len(token_ids) < room
            and matcher.is_stopped()
        ):
            token_ids += grammar.eos_token_ids
            grammar.is_ended = True
        grammar.num_consumed = batch.num_tokens[slot] = end = start + len(token_ids)
        batch.token_ids[slot, start:end] = token_ids
        return token_ids

    # ------------------------------------------------------------ the thread of masks

    def _find_masks(self, work: list[tuple[int, SlotGrammar, list[int]]]) -> None:
        """Each matcher by itself, so that its time is known; the GIL is released meanwhile."""
        waiting = deque(work)
        others = [
            _submit(self._mask_helpers, self._find_waiting, waiting)
            for _ in range(min(len(work), self._num_mask_threads) - 1)
        ]
        self._find_waiting(waiting)
        for other in others:
            other.result()

    def _find_waiting(self, waiting: deque[tuple[int, SlotGrammar, list[int]]]) -> None:
        while True:
            try:
                slot, grammar, token_ids = waiting.popleft()
            except IndexError:  # another thread has taken the last
                return
            words = self._bitmask[slot]
            try:
                if grammar.matcher is None and grammar.error is None:
                    compiled = self._compile(key_of(grammar.params), grammar.params)
                    grammar.matcher = compiled.deep_copy()
                with grammar.timed():
                    if grammar.advance(token_ids) and grammar.matcher is not None:
                        grammar.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
                self._finish_mask(words, grammar)
            except InvalidParameterError as error:
                grammar.error = RowRefusal(error.parameter, error.problem)
            except Exception as error:
                grammar.fail(error)
            if grammar.error is not None:
                words[:] = 0

    def _find_ahead(self, work: list[tuple[SlotGrammar, list[int]]]) -> None:
        for grammar, drafts in work:
            try:
                with grammar.timed():
                    for words in grammar.look_ahead(drafts, self._bitmask.shape[1]):
                        self._finish_mask(words, grammar)
            except Exception as error:
                grammar.fail(error)

    def _finish_mask(self, words: np.ndarray, grammar: SlotGrammar) -> None:
        """words [num_mask_words]: replaces llguidance's end-of-sequence token by the request's.

        A row at its end allows only these, and one in error nothing.
        """
        matcher, view = grammar.matcher, words.view(np.uint32)
        if grammar.error is None and matcher is not None and matcher.is_error():
            grammar.error = _problem_of(matcher)
        if grammar.error is not None:
            return
        if grammar.is_ended:
            words[:] = 0
        else:
            assert matcher is not None  # it has not failed
            word, bit = divmod(self._require_compiler().tokenizer.eos_token, 32)
            if not int(view[word]) >> bit & 1 or not matcher.is_accepting():
                return
            view[word] &= np.uint32(~(1 << bit) & 0xFFFFFFFF)
        for token_id in grammar.eos_token_ids:
            view[token_id >> 5] |= np.uint32(1 << (token_id & 31))

    def shutdown(self) -> None:
        """Stops threads and processes. May be called twice."""
        for check in self._all_checks:
            check.close()
        self._unchecked.clear()
        for pool in (self._check_pool, self._mask_pool, self._mask_helpers):
            if pool is not None:
                pool.shutdown(wait=True, cancel_futures=True)
        for check in self._all_checks:
            check.end()


def key_of(params: StructuredOutputsParams) -> bytes:
    return sha256(msgspec.msgpack.encode(params)).digest()


def _problem_of(matcher: LLMatcher) -> RowRefusal:
    """Why a matcher cannot go on."""
    if not matcher.is_error():
        problem = "the grammar forbids a token of the output"
    elif is_dead_end(matcher):
        problem = "the grammar came to a dead end: nothing can follow"
    else:
        problem = shorten(matcher.get_error())
    return RowRefusal(Grammars.parameter, problem)


def _is_failure(future: Future) -> bool:
    """Whether the check itself failed, not the grammar. The next check may succeed."""
    return future.exception() is not None and not isinstance(
        future.exception(), InvalidParameterError
    )


_stack_lock = threading.Lock()


def _submit(pool: ThreadPoolExecutor | None, function: Any, *args: Any) -> Future:
    """Starts `function` in a thread with a deep stack: compiling recurses as deep as the grammar
    nests.
    """
    with _stack_lock:
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            if pool is None:
                raise RuntimeError("no grammar has been requested: its threads do not run")
            return pool.submit(function, *args)
        finally:
            threading.stack_size(before)
