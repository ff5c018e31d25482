"""All messages between frontend, engine core and executor ranks.

Must not know: sockets, torch, or who handles what. A receiver never changes a message.
"""

from __future__ import annotations

from enum import IntEnum
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from .config import EngineConfig
from .counters import SchedulerStats
from .lora import LoRARequest
from .params import PoolingParams, SamplingParams, StructuredOutputsParams, require_sampling


class Message(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """Base of all messages. Messages that are sent by themselves have a tag."""


class FinishReason(IntEnum):
    STOP = 0  # end-of-sequence token, stop token id or stop string
    LENGTH = 1  # max_tokens or max_model_len
    ABORT = 2  # the client requested it
    ERROR = 3  # an error inside the engine that affects this request only
    TIMEOUT = 4  # timeout_s

    def __str__(self) -> str:
        return self.name.lower()


class Array:
    """A dense array on the wire, C order.

    `data` is any buffer; large ones travel as frames of their own, without a copy. `dtype` is
    numpy's short name, little endian: "i4", "i8", "f4". numpy.frombuffer(a.data,
    a.dtype).reshape(a.shape) reads it. This is not a Struct, so msgspec passes the whole array to
    codec.py, which decides how its data travels. A received `data` is a memoryview.
    """

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: Any):
        self.dtype = dtype
        self.shape = shape
        self.data = data

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Array):
            return NotImplemented
        return (self.dtype, tuple(self.shape)) == (other.dtype, tuple(other.shape)) and bytes(
            self.data
        ) == bytes(other.data)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Array({self.dtype!r}, {self.shape!r}, <{memoryview(self.data).nbytes} bytes>)"


# ---------------------------------------------------------------- frontend -> engine core


class ImageItem(Message, frozen=True):
    """One input of the encoder of images, and the prompt tokens whose places its rows take.

    An image may be several items: tiles, and a smaller copy of the whole. Each is encoded by
    itself. `spans` are ascending and do not overlap; they hold the model's placeholder. Their
    lengths add up to the rows times the columns of `grid`, which is the encoder's result in reading
    order. Between two spans of an item stand tokens such as the ends of its rows.
    """

    pixels: Array  # u1 [height, width, 3], RGB, already resized; the encoder normalizes
    spans: list[tuple[int, int]]  # (index of the first prompt token, number of tokens)
    grid: tuple[int, int]  # (rows, columns) of the encoder's result
    # 32 bytes: equal where pixels and grid are equal. Cached blocks and encoded rows are found by
    # it, and it is cryptographic, because the clients of a daemon share them.
    digest: bytes

    @property
    def num_rows(self) -> int:
        """How many rows the encoder returns."""
        return self.grid[0] * self.grid[1]

    @property
    def start(self) -> int:
        """The index of the first prompt token whose place a row takes."""
        return self.spans[0][0]

    @property
    def end(self) -> int:
        """One more than the index of the last such token."""
        first, count = self.spans[-1]
        return first + count


def digest_of(pixels: Array, grid: tuple[int, int]) -> bytes:
    """The digest of an ImageItem."""
    head = f"{pixels.dtype} {tuple(pixels.shape)} {tuple(grid)} ".encode()
    digest = sha256(head)
    digest.update(pixels.data)
    return digest.digest()


# Of owners in the background: what slots and blocks they keep when others want them.
BACKGROUND_WEIGHT = 0.01


class EngineCoreRequest(Message, tag="add", frozen=True):
    """One request.

    `params` say whether it generates or pools; `seed` and `max_tokens` of SamplingParams are
    resolved (not None).

    With n > 1 the engine makes n requests of it, which share the prompt's KV cache. Their rows
    carry child_request_id(request_id, index); an abort may name one child, or the parent for all of
    them.
    """

    request_id: str  # unique among all clients of the engine
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    # the model's own first, which is no stop_reason; empty when ignore_eos
    eos_token_ids: list[int] = []
    arrival_time: float = 0.0  # seconds since 1970, by the frontend's wall clock
    priority: int = 0  # lower runs first
    cache_salt: str | None = None  # prefix-cache blocks are shared only between equal salts
    # output tokens that a dead engine already emitted; they are not emitted again
    resume_tokens: list[int] = []
    # Owners of requests share the engine fairly, by weight; "" is the client itself. 0: the owner
    # gives way to those that have a weight, and has BACKGROUND_WEIGHT otherwise.
    owner: str = ""
    owner_weight: float = 1.0
    # by time.monotonic(), which all processes of a machine share; then it ends. 0.0: none
    deadline: float = 0.0
    lora_request: LoRARequest | None = None  # the adapter; None: the model alone
    images: list[ImageItem] = []  # ascending by the places of their rows

    @property
    def sampling_params(self) -> SamplingParams:
        """`params` of a request that generates; raises TypeError for one that pools."""
        return require_sampling(self.params)

    @property
    def num_completions(self) -> int:
        """`n` of SamplingParams, or 1: a request that pools has one result."""
        return self.params.n if isinstance(self.params, SamplingParams) else 1

    @property
    def structured_outputs(self) -> StructuredOutputsParams | None:
        """Those of SamplingParams; None for a request that pools."""
        params = self.params
        return params.structured_outputs if isinstance(params, SamplingParams) else None


def child_request_id(request_id: str, index: int) -> str:
    """The engine's id of completion `index` of a request with n > 1."""
    return f"{index}_{request_id}"


class AbortRequests(Message, tag="abort", frozen=True):
    """Aborts these requests. Unknown ids (already finished) and other clients' requests are
    ignored.

    Each live request is answered with ABORT.
    """

    request_ids: list[str]


class PaceOutputs(Message, tag="pace", frozen=True):
    """Asks for about `rows_per_s` rows per second, those of several steps in one message.

    0, the default, sends the rows of each step at once. Otherwise n rows leave with the first step
    that ends n / rows_per_s seconds after the last rows left, at most 50 ms; below 5 ms, at once. A
    row with more than tokens and their log-probabilities (a first token, an end) is sent at once.
    """

    rows_per_s: Annotated[int, Meta(ge=0)]


class UtilityCall(Message, tag="call", frozen=True):
    """Calls one of the utilities (core/utilities.py). `args` are plain msgpack values."""

    call_id: int
    method: str
    args: list[Any] = []


# A utility that the engine's input thread answers at once, also during a step: the process can run
# Python.
BEAT = "beat"


class Shutdown(Message, tag="shutdown", frozen=True):
    """Makes the engine finish (`drain`) or abort its requests and exit. Only a child's parent sends
    it.
    """

    drain: bool = False


class Config(Message, tag="config", frozen=True):
    """The answer to a spawned engine's HELLO: the configuration to run."""

    config: EngineConfig
    epoch: int = 0
    engine_index: int = 0


class StartWave(Message, tag="start_wave", frozen=True):
    """To all engines that share experts, at once: they run steps together until none has work. Only
    a child's parent sends it.
    """

    number: Annotated[int, Meta(ge=1)]  # one more than the waves that have ended


ClientMessage = (
    EngineCoreRequest | AbortRequests | PaceOutputs | UtilityCall | StartWave | Shutdown | Config
)


# ---------------------------------------------------------------- attaching to a daemon


class Attach(Message, tag="attach", frozen=True):
    """A program asks a daemon to serve it.

    The daemon answers Served, then connects to the program's sockets and sends HELLO and READY; or
    it answers TurnedAway.
    """

    protocol: int
    wire_name: str  # of the program's sockets (ipc/sockets.py)
    key: bytes  # the sockets' public key
    network_namespace: int  # where the sockets' name is valid
    token: bytes = b""  # what another user must know


class Served(Message, tag="served", frozen=True):
    """Its connection stays open as long as the daemon serves this client."""

    pid: int  # of the daemon


class TurnedAway(Message, tag="turned_away", frozen=True):
    cause: str


# ---------------------------------------------------------------- engine core -> frontend

PROTOCOL = 11


class Hello(Message, tag="hello", frozen=True):
    protocol: int
    pid: int


class Progress(Message, tag="progress", frozen=True):
    stage: str  # "import", "load weights", "kv cache"
    fraction: float  # of the stage, from 0 to 1


class Ready(Message, tag="ready", frozen=True):
    """The engine is ready.

    `config` is the running configuration: an attaching client reads its model from it.
    """

    config: EngineConfig
    num_blocks: int
    kv_cache_bytes: int
    epoch: int = 0
    engine_index: int = 0


class Failed(Message, tag="failed", frozen=True):
    """Start-up failed: the engine's own exception, raised again in the caller."""

    error_type: str  # name of the exception class
    message: str
    traceback: str
    parameter: str | None = None  # of an InvalidParameterError


class Finished(Message, frozen=True):
    row: int  # index into EngineCoreOutputs.request_ids
    reason: FinishReason
    stop_reason: int | None = None  # the stop token id that was hit
    error: str | None = None
    # with an error: the user's refused parameter, or None for a failure of the engine
    parameter: str | None = None


class TokenLogprobs(Message, frozen=True):
    """Log-probabilities of the new tokens of one row, before temperature and truncation.

    k is the request's `logprobs`. token_ids i4 [num_tokens, k + 1] with the sampled token first;
    logprobs f4, same shape; ranks i4 [num_tokens] of the sampled token, from 1.
    """

    row: int
    token_ids: Array
    logprobs: Array
    ranks: Array


class PromptLogprobs(Message, frozen=True):
    """Log-probabilities of some of the row's prompt tokens.

    A prompt has one per chunk; after a preemption, some may come twice. `first_index` is the index
    in the prompt of the first scored token, at least 1, since token 0 has no predecessor. token_ids
    i4 [num_tokens, k + 1] with the prompt's own token first; logprobs f4, same shape; ranks i4
    [num_tokens].
    """

    row: int
    first_index: int
    token_ids: Array
    logprobs: Array
    ranks: Array


class Pooled(Message, frozen=True):
    """The result of a request that pools; its row has no tokens and is finished.

    values f4: [size] of an embedding or of classes, [num_tokens, size] of a task by token.
    """

    row: int
    values: Array


class RequestTiming(Message, frozen=True):
    """The engine's timestamps of a request, by time.monotonic() in seconds.

    Sent with the first token, the first token after a preemption, and the last row; each replaces
    the one before. 0.0: not reached. An abort or an error counts as the last token.
    """

    row: int
    queued_time: float = 0.0  # when the engine received it
    scheduled_time: float = 0.0  # when its first step began
    first_token_time: float = 0.0
    last_token_time: float = 0.0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    preemption_times: list[float] = []  # of the first of them
    # the first of them: (step, start, end, tokens), recomputation included
    prefill_chunks: list[tuple[int, float, float, int]] = []


class EngineCoreOutputs(Message, tag="outputs", frozen=True):
    """The rows of one step for one client, or of several steps (PaceOutputs), in columns.

    Row i is request_ids[i]. A row may have no tokens (an abort, an error).

    `engine_index` numbers the engines that one client uses at the same time, `epoch` those that
    replaced each other under one index, and `number` the messages of an engine to one client, from
    0; it is set when the message is sent.
    """

    epoch: int
    request_ids: list[str]
    first_indices: list[int]  # index of the row's first new token among the request's output tokens
    num_tokens: list[int]
    token_ids: list[int]  # new tokens of all rows, concatenated
    finished: list[Finished] = []
    logprobs: list[TokenLogprobs] = []
    # (row, prompt tokens found in the prefix cache), once, with the first token
    num_cached_tokens: list[tuple[int, int]] = []
    stats: SchedulerStats | None = None
    timestamp: float = 0.0  # time.monotonic() of the engine, seconds
    prompt_logprobs: list[PromptLogprobs] = []
    timings: list[RequestTiming] = []
    # For several steps: the end of each step, as `timestamp`, and for each of token_ids the index
    # of its step. Both are empty for one step.
    step_times: list[float] = []
    token_steps: list[int] = []
    engine_index: int = 0
    pooled: list[Pooled] = []
    number: int = 0

    def __post_init__(self) -> None:
        """Refuses columns that do not match, like any other bad frame."""
        num_rows = len(self.request_ids)
        are_rows = num_rows == len(self.first_indices) == len(self.num_tokens)
        if not are_rows or min(self.num_tokens, default=0) < 0:
            raise ValueError("the columns of EngineCoreOutputs differ in length")
        if sum(self.num_tokens) != len(self.token_ids):
            raise ValueError(
                f"EngineCoreOutputs has {len(self.token_ids)} tokens for rows of "
                f"{sum(self.num_tokens)}"
            )
        if self.token_steps:
            self._check_steps()
        parts = (self.finished, self.logprobs, self.prompt_logprobs, self.timings, self.pooled)
        rows = [part.row for column in parts for part in column]
        rows += [row for row, _ in self.num_cached_tokens]
        if rows and not 0 <= min(rows) <= max(rows) < num_rows:
            raise ValueError(f"EngineCoreOutputs refers to rows {rows} of {num_rows}")

    def _check_steps(self) -> None:
        is_of_tokens = len(self.token_steps) == len(self.token_ids)
        if not is_of_tokens or not (
            0 <= min(self.token_steps) <= max(self.token_steps) < len(self.step_times)
        ):
            raise ValueError(
                f"EngineCoreOutputs has {len(self.token_steps)} tokens' steps, of "
                f"{len(self.step_times)}, for {len(self.token_ids)} tokens"
            )


class UtilityResult(Message, tag="result", frozen=True):
    call_id: int
    result: Any = None
    failure: Failed | None = None


class EngineDead(Message, tag="dead", frozen=True):
    """The engine's last message before it exits because of an error that no single request
    caused.
    """

    cause: str


class WaveReport(Message, tag="wave", frozen=True):
    """How many waves have ended (see StartWave), and which one the engine wants; 0: none."""

    num_ended: int
    wanted: int = 0


EngineMessage = (
    EngineCoreOutputs | UtilityResult | WaveReport | EngineDead | Hello | Progress | Ready | Failed
)
