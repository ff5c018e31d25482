"""What a trace of the engine consists of: for some steps in a row, what the scheduler decided, what
the model was given, and when each kernel ran on how many bytes.

Must not know: who records a step, what is shown of it.

Moments are seconds of time.monotonic(), which all processes of a machine share. `place` is a line
of source code as "file:line", the file relative to the package.
"""

from __future__ import annotations

import msgspec

MAX_STEPS = 64  # of one trace


class Record(msgspec.Struct, frozen=True, gc=False):
    """Base of a trace's parts, which travel as objects with the names of their fields."""


class Kernel(Record, frozen=True):
    """One operation that ran."""

    module: str  # of the model, as in "layers.3.mlp.gate_up_proj"; "" outside of one
    op: str
    implementation: str
    shape: str
    dtype: str
    begin_s: float
    seconds: float
    weight_bytes: int = 0  # read
    other_bytes: int = 0  # of activations and KV cache, read and written
    flops: int = 0
    place: str = ""  # where the model calls it
    implementation_place: str = ""
    threads: list[tuple[int, float, float]] = []  # (thread, begin_s, end_s), where known
    pass_number: int = 0  # of several decoding steps in one call


class Span(Record, frozen=True):
    name: str
    begin_s: float
    seconds: float
    place: str = ""


class Input(Record, frozen=True):
    name: str
    shape: list[int]
    dtype: str


class RankTrace(Record, frozen=True):
    """What one rank did in a step."""

    begin_s: float
    seconds: float
    inputs: list[Input] = []
    spans: list[Span] = []  # "model", "sampler"
    kernels: list[Kernel] = []
    experts: dict[int, list[int]] = {}  # layer -> rows that each of its experts computed


class Row(Record, frozen=True):
    """A request that the step computes."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int  # before the step
    num_lookahead_tokens: int
    num_known_tokens: int  # prompt and output, with tokens that a step in flight samples
    is_new: bool  # it was admitted in this step
    num_blocks: int  # new in its block table, those of the prefix cache included
    num_cached_tokens: int  # of a new request, in the prefix cache
    num_ahead: int = 0  # lookahead tokens that the step computed; of drafts, the accepted ones


class Waiting(Record, frozen=True):
    """A request that the step does not compute. `reason`: "budget", "blocks", "slots" (max_num_seqs
    requests run), "preemption" (the step preempted another), "order" (the request before it in the
    queue does not fit), "sibling" (its prompt is computed for another completion), "pause",
    "grammar" (it is being compiled).
    """

    request_id: str
    reason: str
    num_tokens: int
    priority: int


class StepTrace(Record, frozen=True):
    step: int
    begin_s: float
    schedule_s: float
    execute_begin_s: float
    execute_s: float
    process_s: float
    budget: int  # max_num_batched_tokens
    rows: list[Row]
    waiting: list[Waiting]
    preempted: list[str]
    finished: list[str]
    num_free_blocks: list[int]  # before the scheduling, after it, and after the step
    num_tokens: int  # sampled
    ranks: list[RankTrace] = []


class MachineLimits(Record, frozen=True):
    """Measured on this machine, with the engine's threads; 0 where it is not known."""

    bytes_per_s: float = 0.0  # as much memory as the weights take, at most 256 MiB
    flops: float = 0.0  # products in the model's dtype
    int8_ops: float = 0.0  # products of integers, where weights are quantized
    fp32_flops: float = 0.0  # products in fp32, where layers keep states


class RanksTrace(Record, frozen=True):
    """What the executor recorded: for each step, by its number, the ranks."""

    steps: dict[int, list[RankTrace]] = {}
    limits: MachineLimits = MachineLimits()
    places: dict[str, str] = {}  # by stage
    notes: list[str] = []
    implementation: str = ""
    model_class: str = ""


class Coded(Record, frozen=True):
    """A message that one end of the wire has encoded or decoded."""

    request_id: str  # of a request; "" of outputs
    number: str  # of outputs: what distinguishes them from others
    begin_s: float
    seconds: float
    num_bytes: int
    made_s: float = 0.0  # of outputs, EngineCoreOutputs.timestamp
    queued_s: dict[str, float] = {}  # by request, when the engine's main thread took it


class Hop(Record, frozen=True):
    """A message between the frontend and an engine in another process:

    handed ─wait─▶ encode ──▶ encoded ─socket─▶ decode ──▶ decoded ─wait─▶ taken
    """

    request_id: str  # of a request to the engine; "": outputs for the frontend
    num_bytes: int
    handed_s: float  # of outputs: the end of the last step that they are of
    encode_begin_s: float
    encode_s: float
    decode_begin_s: float  # it has come out of the socket
    decode_s: float
    taken_s: float = 0.0  # by the engine's main thread or by the frontend; 0: not yet


class EngineTrace(Record, frozen=True):
    model: str
    dtype: str
    device: str
    num_threads: int
    implementation: str
    model_class: str
    pid: int
    steps: list[StepTrace] = []
    limits: MachineLimits = MachineLimits()
    places: dict[str, str] = {}
    notes: list[str] = []  # how the traced steps differ from others
    coded: list[Coded] = []  # by an engine in another process; its client makes hops of them
    hops: list[Hop] = []


def place_of(filename: str, line: int) -> str:
    """`filename` relative to the package or, outside of it, to the packages' directory."""
    root = __file__.removesuffix("ipc/trace.py")
    path = filename.removeprefix(root)
    for folder in ("/site-packages/", "/dist-packages/"):
        path = path.rpartition(folder)[2]
    if path.startswith("/"):  # a script of the user
        path = path.rpartition("/")[2]
    return f"{path}:{line}"


def place_of_function(function: object) -> str:
    """Where a Python function or method is defined; "" for others."""
    function = getattr(function, "__func__", function)
    function = getattr(function, "__wrapped__", function)
    code = getattr(function, "__code__", None)
    return "" if code is None else place_of(code.co_filename, code.co_firstlineno)
