"""The messages between the executor of several ranks and the ranks.

Must not know: processes, what a rank does with a message.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...ipc.block_offload import Beginning, Transfers
from ...ipc.config import EngineConfig
from ...ipc.lora import LoRARequest
from ...ipc.messages import Failed, Message
from ...ipc.models.kv_layout import KVLayout
from ...ipc.params import StructuredOutputsParams
from ...ipc.step_messages import ModelRunnerOutput, SchedulerOutput
from ...ipc.trace import RanksTrace
from .ring import GroupEnds, RingEnds, StageEnds

MAX_MESSAGE_BYTES = 2**40  # both ends are one program


class RankLostError(RuntimeError):
    """A rank has found that another one is gone. The engine hears the cause from elsewhere."""


class RankEnds(msgspec.Struct, frozen=True):
    """What a rank on the engine's machine inherits from the engine's process. It stands on the
    rank's command line, as JSON.
    """

    rank: int  # stage * tensor_parallel_size + the rank in its group
    size: int
    commands: RingEnds
    replies: RingEnds
    group: GroupEnds | None  # None: it is alone in its stage
    stages: StageEnds | None  # None: there is one
    # of the file where ranks on GPUs find each other; None: tensors go through shared memory
    store: int | None = None
    awake_s: float = 0.0  # how long it polls in native code before it sleeps
    timeout_s: float = 600.0  # how long it waits there


class NetworkEnds(msgspec.Struct, frozen=True):
    """What a launcher (network.py) gives to a rank on another machine."""

    rank: int  # as in RankEnds
    tensor_parallel_size: int
    pipeline_parallel_size: int
    commands: str  # addresses of the engine's sockets (ipc/sockets.py)
    replies: str
    key: bytes  # of both; a secret between the engine and its ranks
    timeout_s: float  # of an operation among ranks


def host_name(rank: int) -> str:
    """The name under which a rank publishes the address of its machine."""
    return f"host/{rank}"


# ---------------------------------------------------------------- to the ranks


class Configure(Message, tag="configure", frozen=True):
    """Gives a rank its configuration; it is the first message."""

    config: EngineConfig


class Sampled(Message, frozen=True):
    """What the last stage sampled in a step: two columns of its ModelRunnerOutput, and the drafts
    that follow, as in StepDone.
    """

    num_sampled: list[int]
    token_ids: list[int]
    num_drafts: list[int] = []
    draft_ids: list[int] = []


class Step(Message, tag="step", frozen=True):
    """`sampled`: the tokens of the steps that were finished since the last Step, in order; a stage
    before the last one appends them first.
    """

    output: SchedulerOutput
    sampled: list[Sampled] = []


class Call(Message, tag="call", frozen=True):
    """Calls a method of Rank.CALLS."""

    method: str
    args: list[Any] = []


class MoveBlocks(Message, tag="move", frozen=True):
    """Calls a method of the rank's KVOffload (executor/offload/kv_offload.py) that stores, loads or
    forgets blocks or states. A Kept answers it.
    """

    method: str
    args: list[Any] = []


class Fetch(Message, tag="fetch", frozen=True):
    """Brings the rank's share of what other engines have of a prompt, beside steps. An Answer says
    that it has ended. The fields are those of a Beginning (ipc/block_offload.py).
    """

    number: int
    block_size: int
    windows: tuple[int, ...]
    digests: list[bytes]
    cached: list[bytes]
    num_to_state: int

    @classmethod
    def of(cls, number: int, beginning: Beginning) -> Fetch:
        layout, digests, cached, num_to_state = beginning
        return cls(
            number, layout.block_size, layout.windows, list(digests), list(cached), num_to_state
        )

    def beginning(self) -> Beginning:
        layout = KVLayout(self.block_size, self.windows)
        return Beginning(layout, self.digests, set(self.cached), self.num_to_state)


class EndFetch(Message, tag="end_fetch", frozen=True):
    """Nobody waits for the Fetch with this number any more."""

    number: int


class CheckGrammar(Message, tag="grammar", frozen=True):
    number: int
    params: StructuredOutputsParams
    is_known: bool
    owner: str


class ReadLora(Message, tag="lora", frozen=True):
    """Reads an adapter beside steps."""

    number: int
    request: LoRARequest


class Leave(Message, tag="leave", frozen=True):
    """Tells a rank to end; it is the last message."""


Command = Configure | Step | Call | MoveBlocks | Fetch | EndFetch | CheckGrammar | ReadLora | Leave

# ---------------------------------------------------------------- from a rank


class Kept(Message, tag="kept", frozen=True):
    """What a rank keeps outside the cache: the names that have come and gone since its last Kept;
    the first time, all names.
    """

    added: list[bytes] = []
    removed: list[bytes] = []
    num_corrupt: int = 0  # since the start
    is_loaded: bool = True  # what was to be loaded
    transfers: Transfers | None = None  # since the start; None: nothing since the last Kept


class OffloadOpened(Message, tag="opened", frozen=True):
    """A rank's share of what is kept outside the cache, or why there is none."""

    num_blocks: int = 0  # it has room for
    block_bytes: int = 0
    blocks_per_state: int = 0  # 0: its layers keep no states
    has_blocks: bool = False  # its layers have a part of the KV cache
    kept: Kept = Kept()
    failure: Failed | None = None


class StepDone(Message, tag="done", frozen=True):
    """`output` is that of the last stage's first rank; the others of this stage send what their
    output must have in common with it. `kept`: what engines that share the rank's file have
    changed; None: nothing. Where the last stage drafts, num_drafts says how many drafts follow each
    row, and draft_ids are these, for the next step of the same requests.
    """

    digest: int = 0
    output: ModelRunnerOutput | None = None
    kept: Kept | None = None
    num_drafts: list[int] = []
    draft_ids: list[int] = []

    def sampled(self) -> Sampled:
        """What the other stages must know of it. Only that of the last stage's first rank."""
        assert self.output is not None
        output = self.output
        drafts = self.num_drafts, self.draft_ids
        return Sampled(output.num_sampled, output.token_ids, *drafts)


class Result(Message, tag="result", frozen=True):
    value: Any = None


class Trace(Message, tag="trace", frozen=True):
    """A RanksTrace as JSON, since its parts are objects with the names of their fields."""

    trace: bytes

    @classmethod
    def of(cls, trace: RanksTrace) -> Trace:
        return cls(msgspec.json.encode(trace))

    def decode(self) -> RanksTrace:
        return msgspec.json.decode(self.trace, type=RanksTrace)


class Loading(Message, tag="loading", frozen=True):
    stage: str
    fraction: float


class Answer(Message, tag="answer", frozen=True):
    """Answers what is done beside steps: a Fetch, CheckGrammar or ReadLora with this number."""

    number: int
    failure: Failed | None = None
    value: str = ""  # of a ReadLora: the stamp of the files


Reply = StepDone | Result | OffloadOpened | Kept | Trace | Loading | Answer | Failed
