"""The messages between engine core and executor: the work of a step, and its results.

Must not know: sockets, torch, clients. A receiver never changes a message.
"""

from __future__ import annotations

from .lora import LoRARequest
from .messages import Array, Message
from .params import PoolingParams, SamplingParams, require_sampling


class ImagePlace(Message, array_like=True, frozen=True, gc=False):
    """Where an image is in a prompt: its tokens [start, end), and the rows and columns of the
    encoder's result.
    """

    start: int
    end: int
    rows: int
    columns: int


class ImageToEncode(Message, frozen=True):
    """The encoder's result has num_rows rows, which the table of encoded images gets from first_row
    on.
    """

    pixels: Array  # see ImageItem
    num_rows: int
    first_row: int


class NewRequestData(Message, frozen=True):
    """A request enters a slot, for the first time or after a preemption (with its output in
    token_ids).
    """

    slot: int  # in [0, max_num_seqs); free until it appears in freed_slots
    request_id: str
    token_ids: list[int]  # prompt + output so far
    num_prompt_tokens: int
    params: SamplingParams | PoolingParams
    # the request's own: min_tokens masks them, and a finished grammar requires one of them
    eos_token_ids: list[int] = []
    # The adapter, which the executor holds (Executor.add_lora). lora_int_id is the number that the
    # core gave this load of it.
    lora_request: LoRARequest | None = None
    cache_salt: str | None = None  # requests with different salts share nothing
    images: list[ImagePlace] = []  # of its prompt, ascending

    @property
    def sampling_params(self) -> SamplingParams:
        """`params` of a request that generates; raises TypeError for one that pools."""
        return require_sampling(self.params)


class SchedulerOutput(Message, frozen=True):
    """The work of one step, as differences.

    Columns are parallel with `slots`, in the order in which requests were scheduled.

    The runner moves blocks: first out, then in, then copies. Then it copies states from place to
    place, in the order of `state_copies`, and no write of this step comes before. It applies
    `freed_slots`, then `new_requests`, and appends `new_block_ids[i]` to the block tables of
    slots[i]. Then it computes tokens [num_computed_tokens[i], num_computed_tokens[i] +
    num_scheduled_tokens[i]) of each. A row that computes its last known token is sampled, and the
    runner appends the sampled token to the slot's tokens. With `num_lookahead_tokens`, row i then
    decodes that many more tokens, one after the other; its blocks have room for them. A runner that
    drafts computes at most as many more, in at most `num_passes` passes of the model, and
    ModelRunnerOutput.num_ahead tells how many.

    A step may be submitted before the previous one has run. Rows of a slot that failed or ended in
    the previous step are computed, and their samples are ignored. Where drafts of the previous step
    are not verified yet, the columns count them as accepted: a row computes what is left of the
    tokens that its slot then has.
    """

    step: int
    slots: list[int] = []
    num_scheduled_tokens: list[int] = []
    num_computed_tokens: list[int] = []  # before this step
    # A new request's row holds its whole block table. With several groups of layers: the blocks of
    # the first group, then equally many of the next, and so on.
    new_block_ids: list[list[int]] = []
    new_requests: list[NewRequestData] = []
    freed_slots: list[int] = []  # finished, aborted or preempted since the last step
    num_lookahead_tokens: list[int] = []  # parallel with slots, or empty for none
    blocks_to_swap_out: list[tuple[int, int]] = []  # (device block, host block)
    blocks_to_swap_in: list[tuple[int, int]] = []  # (host block, device block)
    blocks_to_copy: list[tuple[int, int]] = []  # (source, destination), both on the device
    num_passes: int = 1  # more only where all rows are decodes
    # Of a model that keeps states (ipc/models/state_layout.py), else empty. Places below
    # max_num_seqs are those of slots, checkpoints have the others. A row that begins at position 0
    # begins with zeros, whatever its place holds.
    state_copies: list[tuple[int, int]] = []  # (source place, destination place)
    # (slot, position, place): the slot's state after the token at this position is also written to
    # the place. A row has at most one; with lookahead the position may be that of any of its tokens
    # but the last one sampled.
    state_saves: list[tuple[int, int, int]] = []
    # Of a model that reads images, else empty. The runner encodes these before the step's tokens
    # are computed.
    images_to_encode: list[ImageToEncode] = []
    # (slot, position, count, row): the tokens of the slot at `count` positions from this one on
    # read the table's rows from `row` on, in place of their embeddings.
    image_rows: list[tuple[int, int, int, int]] = []

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)


class PreemptionCosts(Message, frozen=True):
    """What it costs on this machine to bring a preempted request back, in seconds.

    The executor measures it at start-up.
    """

    recompute_s_per_token: float = 1.0
    swap_s: float = 0.0  # of any swap, out and in
    swap_s_per_token: float = 0.0


class SlotLogprobs(Message, frozen=True):
    """Log-probabilities of one sampled row: token_ids i4 [num_tokens, k + 1], logprobs f4 of the
    same shape, ranks i4 [num_tokens].
    """

    slot: int
    token_ids: Array
    logprobs: Array
    ranks: Array


class SlotPromptLogprobs(Message, frozen=True):
    """Log-probabilities of the prompt tokens that one row's chunk predicts; see PromptLogprobs."""

    slot: int
    first_index: int
    token_ids: Array
    logprobs: Array
    ranks: Array


class SlotPooled(Message, frozen=True):
    """The result of a request that pools, whose prompt is complete; see Pooled."""

    slot: int
    values: Array


class RowRefusal(Message, frozen=True):
    """Why a request cannot continue, where one of its own parameters is the reason."""

    parameter: str
    problem: str

    def __str__(self) -> str:
        return f"{self.parameter}: {self.problem}"


# The error of a request; it is text alone where the engine failed.
RowError = str | RowRefusal


class ModelRunnerOutput(Message, frozen=True):
    """Parallel with SchedulerOutput.slots.

    num_sampled[i] is 0 for a prompt that is not complete yet, and for a row in `errors` (with
    lookahead it counts the tokens before the error). It exceeds 1 with lookahead, and where a
    grammar forces tokens.
    """

    num_sampled: list[int]
    token_ids: list[int]  # sampled tokens of all rows, concatenated
    logprobs: list[SlotLogprobs] = []
    errors: dict[int, RowError] = {}  # slot -> the error of this request
    prompt_logprobs: list[SlotPromptLogprobs] = []
    pooled: list[SlotPooled] = []  # in any order
    # Of an engine that drafts, parallel with slots, else empty: how many of the lookahead tokens
    # have keys and values now.
    num_ahead: list[int] = []
    # for each draft that was verified: the number of its tokens, and how many were accepted
    num_drafted: list[int] = []
    num_accepted: list[int] = []
    # slot -> CPU seconds that its grammar has taken since the last report, if noticeable
    grammar_s: dict[int, float] = {}
