"""The state of the requests that a rank runs: fixed slots, one row each in a few tables.

Must not know: request ids, scheduling, the model. The scheduler owns slots and blocks; these tables
are its copy, updated by differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..ipc.errors import InvalidParameterError
from ..ipc.lora import LoRARequest
from ..ipc.params import ALL_LOGPROBS, PoolingParams, SamplingParams
from ..ipc.step_messages import NewRequestData, RowError, RowRefusal, SchedulerOutput

# a smaller share would round to 0 in 32 bits, and no token would be left
LEAST_TOP_P = float(np.finfo(np.float32).tiny)
NO_LOGPROBS = -1
NOT_KNOWN = -1  # a token that the device has sampled and the host has not received
# of a request that is refused or pools
NOT_SAMPLED = SamplingParams(temperature=0.0, seed=0)
# of num_logprobs; the vocabulary's size limits it later
WHOLE_VOCABULARY = 2**31 - 1


class AdapterSlots(Protocol):
    """Gives the adapters of requests their places in the layers; Loras implements it."""

    def enter(self, slot: int, lora_int_id: int) -> int:
        """Returns the place of the adapter. Raises InvalidParameterError."""
        ...

    def leave(self, slot: int) -> None: ...


class InputBatch:
    """Tables indexed by slot.

    Rows of free slots keep old values, which are not read. `stages` (LogitsStages) keep their own
    state and are called here when requests enter and leave.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        stages: Any,
        kv_cache_windows: Sequence[int] = (0,),
        loras: AdapterSlots | None = None,
    ):
        """kv_cache_windows: see Executor. loras: of an engine with LoRA adapters."""
        self.block_size = block_size
        self.num_groups = len(kv_cache_windows)
        # the null block stands where a window has been
        self._least_block = 0 if any(kv_cache_windows) else 1
        self.num_cache_blocks = 2**31  # ids of the KV cache are below this: see use_cache
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = np.zeros((max_num_seqs, max_model_len), np.int32)  # prompt + output
        # of a request that pools one more than it has: its last token is never sampled
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.block_tables = np.zeros((self.num_groups, max_num_seqs, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)  # 0: all
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seeds = np.zeros(max_num_seqs, np.int64)
        self.num_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        self.num_prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        self.prompt_logprobs_slots: set[int] = set()  # slots that still want some
        self.logprobs_slots: set[int] = set()  # slots that want any
        self.random_slots: set[int] = set()  # slots that are not greedy
        # those of them with top_k, top_p or min_p
        self.filtered_slots: set[int] = set()
        self.stages = stages
        # requests so far: while it is unchanged, slots change only in tokens and blocks
        self.num_added = 0
        # the number of the request that entered the slot last
        self.entries = np.zeros(max_num_seqs, np.int64)
        # tokens of each slot's request when it entered the slot
        self.num_entry_tokens = np.zeros(max_num_seqs, np.int64)
        # the cache_salt and the number of the adapter, of the slots whose requests have any: text
        # is remembered for requests with the same ones
        self.salts: dict[int, tuple[str | None, int | None]] = {}
        # slots whose rows are sampled by SpecialRows: pooling, log-probabilities, stages, refusals
        self.special_slots: set[int] = set()
        self.refusals: dict[int, RowError] = {}  # slot -> why this request cannot be served
        self.pooling: dict[int, PoolingParams] = {}  # of the slots whose requests pool
        self.second_text_start = np.zeros(max_num_seqs, np.int64)  # of a pair; 0: one text
        self.loras = loras
        # the place of each slot's LoRA adapter; -1: it has none
        self.adapters = np.full(max_num_seqs, -1, np.int32)

    def use_cache(self, num_blocks: int) -> None:
        """The KV cache has so many blocks from now on."""
        self.num_cache_blocks = num_blocks

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Applies the differences of a step, which moves its blocks before."""
        for slot in scheduler_output.freed_slots:
            self.remove(slot)
        for request in scheduler_output.new_requests:
            self.add(request)
        for slot, block_ids in zip(scheduler_output.slots, scheduler_output.new_block_ids):
            if block_ids:
                self.append_blocks(slot, block_ids)

    def add(self, request: NewRequestData) -> None:
        slot, count = request.slot, len(request.token_ids)
        self.remove(slot)
        self.num_added += 1
        self.entries[slot] = self.num_added
        self.token_ids[slot, :count] = request.token_ids
        self.num_tokens[slot] = self.num_entry_tokens[slot] = count
        self.num_prompt_tokens[slot] = request.num_prompt_tokens
        params = request.params
        if self._is_special(request):
            params = self._add_special(request)
        assert isinstance(params, SamplingParams)
        self.temperature[slot] = params.temperature
        self.top_k[slot] = max(0, min(params.top_k, 2**31 - 1))
        self.top_p[slot] = max(params.top_p, LEAST_TOP_P)
        self.min_p[slot] = params.min_p
        self.seeds[slot] = params.seed or 0
        if params.temperature > 0:
            self.random_slots.add(slot)
            if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                self.filtered_slots.add(slot)

    def _is_special(self, request: NewRequestData) -> bool:
        """Whether the request needs more than its tokens, blocks and the columns of
        sample_tokens.
        """
        params = request.params
        return (
            isinstance(params, PoolingParams)
            or params.seed is None
            or params.logprobs is not None
            or params.prompt_logprobs is not None
            or request.lora_request is not None
            or request.cache_salt is not None
            or self.stages.are_asked_for(params)
        )

    def _add_special(self, request: NewRequestData) -> SamplingParams:
        """Returns what it is sampled with."""
        slot, params, lora_request = request.slot, request.params, request.lora_request
        if lora_request is not None:
            self._enter_adapter(slot, lora_request)
        if request.cache_salt is not None or lora_request is not None:
            lora_int_id = None if lora_request is None else lora_request.lora_int_id
            self.salts[slot] = request.cache_salt, lora_int_id
        if isinstance(params, PoolingParams):
            self.pooling[slot] = params
            self.second_text_start[slot] = params.second_text_start
            self.num_tokens[slot] += 1
            params = NOT_SAMPLED
        elif (refusal := find_unsupported(params) or self._enter_stages(request)) is not None:
            self.refusals[slot] = refusal
            params = NOT_SAMPLED
        if params.logprobs is not None:
            self.num_logprobs[slot] = _num_logprobs(params.logprobs)
            self.logprobs_slots.add(slot)
        if params.prompt_logprobs is not None:
            self.num_prompt_logprobs[slot] = _num_logprobs(params.prompt_logprobs)
            self.prompt_logprobs_slots.add(slot)
        self._find_special(slot)
        return params

    def _find_special(self, slot: int) -> None:
        """Notes whether the host has to sample the slot's rows by other means than a draw."""
        if (
            slot in self.logprobs_slots
            or slot in self.prompt_logprobs_slots
            or slot in self.pooling
            or slot in self.refusals
            or self.stages.are_wanted_by([slot])
        ):
            self.special_slots.add(slot)
        else:
            self.special_slots.discard(slot)

    def end_prompt_logprobs(self, slot: int) -> None:
        """The prompt of this slot has been scored."""
        self.prompt_logprobs_slots.discard(slot)
        self._find_special(slot)

    def _enter_stages(self, request: NewRequestData) -> RowError | None:
        try:
            self.stages.enter(request)
        except InvalidParameterError as error:
            if error.parameter == "logits_processors":  # the server's, not the request's
                return str(error)
            return RowRefusal(error.parameter, error.problem)
        return None

    def _enter_adapter(self, slot: int, lora_request: LoRARequest) -> None:
        if self.loras is None:
            problem = "needs an engine with enable_lora=True"
            self.refusals[slot] = RowRefusal("lora_request", problem)
            return
        try:
            self.adapters[slot] = self.loras.enter(slot, lora_request.lora_int_id)
        except InvalidParameterError as error:
            self.refusals[slot] = RowRefusal(error.parameter, error.problem)

    def remove(self, slot: int) -> None:
        """May be called for free slots, too."""
        self.num_tokens[slot] = self.num_blocks[slot] = 0
        self.random_slots.discard(slot)
        self.filtered_slots.discard(slot)
        if slot in self.special_slots:
            self._remove_special(slot)
        if slot in self.salts:
            del self.salts[slot]
            self._leave_adapter(slot)

    def _remove_special(self, slot: int) -> None:
        self.special_slots.discard(slot)
        self.logprobs_slots.discard(slot)
        self.prompt_logprobs_slots.discard(slot)
        self.num_logprobs[slot] = NO_LOGPROBS
        self.num_prompt_logprobs[slot] = NO_LOGPROBS
        self.stages.leave(slot)
        self.refusals.pop(slot, None)
        self.pooling.pop(slot, None)
        self.second_text_start[slot] = 0

    def _leave_adapter(self, slot: int) -> None:
        if self.loras is not None:
            self.adapters[slot] = -1
            self.loras.leave(slot)

    def append_blocks(self, slot: int, block_ids: list[int]) -> None:
        """block_ids: those of the first group, then equally many of the next, and so on.

        Raises ValueError for an id that the cache does not have: kernels do not check.
        """
        least = self._least_block
        if block_ids and not least <= min(block_ids) <= max(block_ids) < self.num_cache_blocks:
            raise ValueError(
                f"new_block_ids: must be between {least} and {self.num_cache_blocks - 1}, got "
                f"{block_ids} for slot {slot}"
            )
        start, count = self.num_blocks[slot], len(block_ids) // self.num_groups
        self.block_tables[:, slot, start : start + count] = np.reshape(
            block_ids, (self.num_groups, count)
        )
        self.num_blocks[slot] = start + count

    def check_blocks(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """Raises ValueError unless the blocks of each of `slots` [B] have room for so many tokens
        [B]: behind them the tables hold blocks of other requests, and kernels do not check.
        """
        room = self.num_blocks[slots] * self.block_size
        if (num_tokens > room).any():
            row = int(np.argmax(num_tokens > room))
            raise ValueError(
                f"num_computed_tokens: must end within the blocks of slot {slots[row]}, which hold "
                f"{room[row]} tokens, got {num_tokens[row]}"
            )

    def draws(self, slots: np.ndarray) -> bool:
        """Whether any of `slots` [R] is not greedy."""
        return bool(self.random_slots) and bool(self.temperature[slots].any())

    def append_tokens(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Appends one token to each of `slots` [R], all different."""
        num_tokens = self.num_tokens[slots]
        self.token_ids[slots, num_tokens] = token_ids
        self.num_tokens[slots] = num_tokens + 1

    def append_runs(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        """Appends token_ids [R, n] to `slots` [R], all different."""
        num_tokens, count = self.num_tokens[slots], token_ids.shape[1]
        self.token_ids[slots[:, None], num_tokens[:, None] + np.arange(count)] = token_ids
        self.num_tokens[slots] = num_tokens + count

    def expect_tokens(self, slots: np.ndarray, positions: np.ndarray) -> None:
        """Adds one token of unknown value to each of `slots` [R], all different, at `positions`
        [R].

        fill_in sets the values later.
        """
        self.token_ids[slots, positions] = NOT_KNOWN
        self.num_tokens[slots] = positions + 1

    def fill_in(
        self, slots: np.ndarray, positions: np.ndarray, entries: np.ndarray, token_ids: np.ndarray
    ) -> None:
        """Sets tokens that expect_tokens added for the requests `entries` [R].

        A slot may have another request by now; its tokens are not changed.
        """
        mine = np.flatnonzero(self.entries[slots] == entries)
        self.token_ids[slots[mine], positions[mine]] = token_ids[mine]


def _num_logprobs(wanted: int | None) -> int:
    if wanted is None:
        return NO_LOGPROBS
    return WHOLE_VOCABULARY if wanted == ALL_LOGPROBS else min(wanted, WHOLE_VOCABULARY)


def find_unsupported(params: SamplingParams) -> str | None:
    """Why the runner cannot serve these params, or None.

    The frontend refuses them first, but another client may not.
    """
    if params.seed is None:
        return "seed: must be resolved before the engine sees the request"
    return None
