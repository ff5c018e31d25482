"""A request in the engine core: its tokens, how many are computed, when it ends, and its block
hashes.

Must not know: text, which blocks hold its KV cache, or which requests run beside it.
"""

from __future__ import annotations

import struct
import time
from dataclasses import InitVar, dataclass, field
from enum import IntEnum
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgspec

from ..ipc.config import resolved
from ..ipc.messages import (
    EngineCoreRequest,
    FinishReason,
    ImageItem,
    RequestTiming,
    child_request_id,
)
from ..ipc.params import PoolingParams, SamplingParams, child_seed, require_sampling
from .lora_slots import Adapter

if TYPE_CHECKING:
    from .forks import Family

MAX_PREEMPTION_TIMES = 32
MAX_PREFILL_CHUNKS = 512


class RequestStatus(IntEnum):
    """WAITING → RUNNING ⇄ PREEMPTED or SWAPPED, and from each of them to one of the final FINISHED
    states.
    """

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2  # waits again; its blocks were taken and its tokens are recomputed
    SWAPPED = 3  # waits again; its blocks are in host memory
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_ERROR = 7
    FINISHED_TIMEOUT = 8


FINISHED_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
    FinishReason.TIMEOUT: RequestStatus.FINISHED_TIMEOUT,
}


def hash_root(cache_salt: str | None, adapter: Adapter | None = None) -> bytes:
    """The parent hash of a sequence's first block.

    It includes everything else that must be equal for blocks to be shared, and so does the whole
    chain. An adapter that was loaded again is another one.
    """
    root = b"" if cache_salt is None else b"salt:" + cache_salt.encode("utf-8", "surrogatepass")
    if adapter is not None:
        root = b"lora:%d:" % adapter.generation + adapter.name.encode() + b"\0" + root
    return sha256(root).digest()


def hash_block(parent: bytes, token_ids: list[int], images: bytes = b"") -> bytes:
    """32 bytes that identify a full block and everything before it, in every process and on every
    machine. images: which rows of which images take the places of its tokens (see images_between).

    The hash is cryptographic, because the clients of a daemon share one cache: no client can craft
    a prompt that hits another client's blocks.
    """
    return sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids) + images).digest()


def images_between(images: list[ImageItem], first: int, end: int) -> bytes:
    """What tells images in the places of the tokens [first, end) of a prompt from others."""
    found = []
    for item in images:
        if item.end <= first or item.start >= end:
            continue
        row = 0
        for start, count in item.spans:
            begin, stop = max(start, first), min(start + count, end)
            if begin < stop:
                place = struct.pack("<3I", begin - first, stop - begin, row + begin - start)
                found.append(item.digest + place)
            row += count
    return b"".join(found)


def split(message: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The n requests of a message with n > 1, with their own ids and seeds; with n = 1 the message
    itself.
    """
    if message.num_completions == 1:
        return [message]
    params = message.sampling_params
    replace = msgspec.structs.replace
    return [
        replace(
            message,
            request_id=child_request_id(message.request_id, index),
            params=replace(params, n=1, seed=child_seed(resolved(params.seed), index)),
        )
        for index in range(params.n)
    ]


@dataclass(slots=True, eq=False)
class RequestOwner:
    """Who sends requests. `served`: computed tokens divided by `weight`; only differences between
    owners have a meaning. `is_background`: it gives way to others, see scheduling/shares.py.
    """

    identity: tuple[int, str] = (0, "")  # client index, name
    served: float = 0.0
    weight: float = 1.0
    is_background: bool = False
    num_requests: int = 0  # unfinished ones
    waiting: list[Request] = field(default_factory=list)  # sorted by key


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """The only owner of a request's token ids.

    `token_ids` = prompt + output; the last ones may not be computed yet. The scheduler updates
    `num_computed_tokens` (tokens whose KV entries exist or are written by the step in flight) and
    `status`. `num_pending_tokens` counts the tokens that a step in flight samples and that are not
    in `token_ids` yet.
    """

    message: InitVar[EngineCoreRequest]  # validated
    max_model_len: InitVar[int]
    client_index: int = 0
    # orders requests: the smallest is scheduled first, the largest is preempted first
    key: tuple[int, int] = (0, 0)
    queued_time: float = field(default_factory=lambda: time.monotonic())
    owner: RequestOwner = field(default_factory=lambda: RequestOwner())
    adapter: Adapter | None = None
    # of the message
    request_id: str = field(init=False)
    params: SamplingParams | PoolingParams = field(init=False)
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_resumed_tokens: int = field(init=False)
    eos_token_ids: list[int] = field(init=False)
    cache_salt: str | None = field(init=False)
    images: list[ImageItem] = field(init=False)
    grammar_s: float | None = field(init=False)  # CPU time of its grammar, if it has one
    # of the parameters; the defaults are those of a request that pools, whose only output is the
    # pooled result
    is_pooling: bool = True
    reads_prefix_cache: bool = True
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    max_output_tokens: int = 1
    # its way through the scheduler
    status: RequestStatus = RequestStatus.WAITING
    family: Family | None = None  # of the message with n > 1 that this request belongs to
    slot: int | None = None  # in the model runner, while RUNNING
    stop_reason: int | None = None
    num_computed_tokens: int = 0
    num_executed_tokens: int = 0  # computed tokens whose step has run and is accounted for
    num_pending_tokens: int = 0
    # tokens that counted as computed and were not, since their steps have drafted; so far
    num_taken_back: int = 0
    # computed tokens whose KV entries wait in host memory, while SWAPPED
    num_swapped_tokens: int = 0
    # tokens below this index are computed a second time
    num_computed_before_preemption: int = 0
    # prompt tokens found in the prefix cache at first admission; None: not admitted yet
    num_cached_tokens: int | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    # times and counts for the client
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    preemption_times: list[float] = field(default_factory=list)  # the first MAX_PREEMPTION_TIMES
    # the first MAX_PREFILL_CHUNKS; see RequestTiming
    prefill_chunks: list[tuple[int, float, float, int]] = field(default_factory=list)
    # with the output token of this index, the client receives the times again
    report_index: int = field(init=False)

    def __post_init__(self, message: EngineCoreRequest, max_model_len: int) -> None:
        self.request_id = message.request_id
        self.params = params = message.params
        self.token_ids = message.prompt_token_ids + message.resume_tokens
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.num_resumed_tokens = self.report_index = len(message.resume_tokens)
        self.eos_token_ids = message.eos_token_ids
        self.cache_salt = message.cache_salt
        self.images = message.images
        self.grammar_s = None if message.structured_outputs is None else 0.0
        if isinstance(params, PoolingParams):
            self.reads_prefix_cache = not params.skip_reading_prefix_cache
            return
        self.is_pooling = False
        # Cached tokens are not computed, so they would have no log-probabilities. The request's own
        # blocks are still offered to others.
        self.reads_prefix_cache = params.prompt_logprobs is None
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.min_tokens = params.min_tokens
        most = max_model_len - self.num_prompt_tokens
        assert params.max_tokens is not None  # arrivals.py refuses None
        self.max_output_tokens = min(params.max_tokens, most)

    @property
    def sampling_params(self) -> SamplingParams:
        """`params` of a generating request; raises TypeError for a pooling one."""
        return require_sampling(self.params)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_tokens_left(self) -> int:
        """Output tokens that may still be sampled, besides pending ones."""
        num_output_tokens = len(self.token_ids) - self.num_prompt_tokens
        return self.max_output_tokens - num_output_tokens - self.num_pending_tokens

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    def append_output_token(self, token_id: int) -> FinishReason | None:
        """Appends a sampled token; returns why the request ends with it, or None.

        The owner then finishes the request. The first of eos_token_ids, the model's own, leaves
        stop_reason None. Further ones and stop token ids are their own stop_reason, as in vLLM. The
        length includes resumed tokens.
        """
        self.token_ids.append(token_id)
        num_output_tokens = len(self.token_ids) - self.num_prompt_tokens
        if num_output_tokens >= self.min_tokens:
            if token_id in self.eos_token_ids:
                if token_id != self.eos_token_ids[0]:
                    self.stop_reason = token_id
                return FinishReason.STOP
            if token_id in self.stop_token_ids:
                self.stop_reason = token_id
                return FinishReason.STOP
        return FinishReason.LENGTH if num_output_tokens >= self.max_output_tokens else None

    def note_preemption(self, now: float) -> None:
        """Records a preemption in the request's times."""
        self.num_preemptions += 1
        if len(self.preemption_times) < MAX_PREEMPTION_TIMES:
            self.preemption_times.append(now)
        self.report_index = self.num_output_tokens

    def note_prefill(self, step: int, start_time: float, end_time: float, num_tokens: int) -> None:
        """Records that a step has computed a part of the prompt, or recomputed tokens after a
        preemption.
        """
        if len(self.prefill_chunks) < MAX_PREFILL_CHUNKS:
            self.prefill_chunks.append((step, start_time, end_time, num_tokens))

    def timing(self, row: int, now: float) -> RequestTiming:
        """Its times, for row `row` of its client's outputs."""
        return RequestTiming(
            row,
            self.queued_time,
            self.scheduled_time,
            self.first_token_time,
            now if self.first_token_time else 0.0,
            self.num_preemptions,
            self.num_recomputed_tokens,
            self.preemption_times.copy(),
            self.prefill_chunks.copy(),
        )

    def extend_block_hashes(self, block_size: int) -> list[bytes]:
        """Hashes the blocks that became full since the last call; returns one digest per full
        block.
        """
        hashes, token_ids = self.block_hashes, self.token_ids
        for start in range(len(hashes) * block_size, len(token_ids) - block_size + 1, block_size):
            parent = hashes[-1] if hashes else hash_root(self.cache_salt, self.adapter)
            end = start + block_size
            images = images_between(self.images, start, end) if self.images else b""
            hashes.append(hash_block(parent, token_ids[start:end], images))
        return hashes

    def describe(self) -> dict[str, Any]:
        """Its state in plain values."""
        return {
            "request_id": self.request_id,
            "status": self.status.name.lower(),
            "client_index": self.client_index,
            "priority": self.key[0],
            "lora_name": None if self.adapter is None else self.adapter.name,
            "num_tokens": self.num_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_computed_tokens": self.num_computed_tokens,
            "num_preemptions": self.num_preemptions,
        }

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens})"
        )
