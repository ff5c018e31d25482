"""`quire bench cpu`: the cost of a model's steps on this CPU, next to its memory and arithmetic
limits.

Must not know: command lines, torch, how a step is computed.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from ...ipc.config import EngineConfig
from ...ipc.errors import InvalidParameterError, QuireError
from ...ipc.models.decoder_config import DecoderConfig
from ...ipc.models.ranks import multiplied_weights
from ..model_info.model_sizes import DTYPE_BYTES, kv_bytes_per_token, measure_model
from ..model_info.plan import bytes_of_blocks

STEP_COSTS = "quire.executor.step_costs"
ROOM = 80  # most tokens that a measured decode adds, rounded up
# Bytes of one weight of a linear layer by `quantization`, without scales, so that a limit is
# slightly too strict.
QUANTIZED_BYTES = {"int8": 1.0, "int4": 0.5}
QUANTIZED_HEAD_BYTES = 1.0  # whatever the layers have


@dataclass(frozen=True)
class CpuLimits:
    """The measured limits, in bytes and operations per second."""

    read_bandwidth: dict[int, float]  # threads -> for as much memory as the weights take
    gemm_flops: dict[str, float]  # type of the numbers -> the fastest product

    def bandwidth(self, num_threads: int) -> float:
        """Returns the highest bandwidth with at most this many threads: fewer are sometimes
        faster.
        """
        return max(rate for count, rate in self.read_bandwidth.items() if count <= num_threads)

    def flops(self, quantized: bool) -> float:
        """Returns the fastest product for this dtype.

        A faster dtype counts, too: bfloat16 may be computed as float32 on a CPU without
        instructions for it. int8 counts for quantized weights only.
        """
        return max(rate for dtype, rate in self.gemm_flops.items() if quantized or dtype != "int8")


@dataclass(frozen=True)
class StepWork:
    """The bytes that a step must read, and the operations that it must compute."""

    num_bytes: float
    weight_flops: float
    attention_flops: float

    def arithmetic_seconds(self, flops_of_weights: float, flops: float) -> float:
        return self.weight_flops / flops_of_weights + self.attention_flops / flops


@dataclass(frozen=True)
class Phase:
    name: str  # "decode" or "prefill"
    batch: int
    context: int  # tokens before a decode, or of the prompt
    num_threads: int
    seconds: float  # median
    fastest_s: float
    bandwidth: float  # bytes per second, and
    flops: float  # operations per second of products with weights
    least_s: float  # median of what the limits allow
    bound: str  # the limit that applies: "memory" or "arithmetic"
    fraction: float  # fraction of the limit that is reached, median of the turns


class ModelWork:
    """The arithmetic of a decoder: products with weights, attention, the head."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: str,
        quantization: str | None = None,
        kv_cache_dtype: str = "auto",
        bytes_in_blocks: float | None = None,
    ):
        """`bytes_in_blocks`: of a weight, where the blocks of files are multiplied."""
        self._config = config
        size, heads = config.hidden_size, config.num_attention_heads
        kinds = [config.layer(index) for index in range(config.num_hidden_layers)]
        widths = [heads * one.head_dim for one in kinds if one.has_attention]
        self.layer_weights = sum(multiplied_weights(config, index) for index in range(len(kinds)))
        self.head_weights = config.vocab_size * size
        per_weight = per_weight_of_head = bytes_in_blocks or DTYPE_BYTES[dtype]
        if quantization:
            per_weight, per_weight_of_head = QUANTIZED_BYTES[quantization], QUANTIZED_HEAD_BYTES
        self.quantized = per_weight < DTYPE_BYTES[dtype]
        # every step reads these; the embedding's rows are not counted
        self.weights_bytes = (
            self.layer_weights * per_weight + self.head_weights * per_weight_of_head
        )
        self.kv_bytes_per_token = kv_bytes_per_token(config, dtype, kv_cache_dtype)
        # of one query with one key and value
        self._attention_flops = 4 * sum(widths)

    def decode(self, batch: int, context: int) -> StepWork:
        keys = batch * (context + 1)
        weight_flops = 2 * batch * (self.layer_weights + self.head_weights)
        return StepWork(
            self.weights_bytes + keys * self.kv_bytes_per_token,
            weight_flops,
            self._attention_flops * keys,
        )

    def prefill(self, num_tokens: int) -> StepWork:
        """Returns the work of a prefill: logits of one row, and each token attends to itself and
        those before it.
        """
        pairs = num_tokens * (num_tokens + 1) / 2
        weight_flops = 2 * (num_tokens * self.layer_weights + self.head_weights)
        return StepWork(
            self.weights_bytes + num_tokens * self.kv_bytes_per_token,
            weight_flops,
            self._attention_flops * pairs,
        )


@dataclass(frozen=True)
class StepPlan:
    """The measurements in one engine with a given number of threads."""

    decode: list[tuple[int, int]]  # (requests, tokens before each)
    prefill: list[int]
    seconds: float  # for each

    @property
    def max_num_seqs(self) -> int:
        return max((batch for batch, _ in self.decode), default=1)

    @property
    def max_model_len(self) -> int:
        return max([context for _, context in self.decode] + self.prefill) + ROOM

    def kv_cache_bytes(self, kv_bytes_per_token: int, block_size: int) -> int:
        tokens = max(
            [batch * (context + ROOM + block_size) for batch, context in self.decode] + self.prefill
        )
        return (tokens + self.max_model_len + 2 * block_size) * kv_bytes_per_token


def model_work(config: EngineConfig) -> ModelWork:
    model_config = config.model_config
    sizes = measure_model(model_config.hf_config, model_config.model, model_config.model_impl)
    if not isinstance(sizes.config, DecoderConfig):
        raise InvalidParameterError("model", "must generate text: its steps are measured")
    kept_bytes = bytes_of_blocks(config, sizes)
    num_weights = sizes.weights_bytes(model_config.dtype) / DTYPE_BYTES[model_config.dtype]
    return ModelWork(
        sizes.config,
        model_config.dtype,
        model_config.quantization,
        config.cache_config.kv_cache_dtype,
        # an average: files have several types, of which a step reads most
        None if kept_bytes is None else kept_bytes / num_weights,
    )


def run_plan(
    config: EngineConfig, plan: StepPlan, work: ModelWork, limits: CpuLimits | None
) -> tuple[CpuLimits, list[Phase]]:
    """Runs the measurements in a separate process, which prints nothing.

    If `limits` is None, they are measured first. `config` is resolved and fits the plan. Raises
    QuireError if the process fails; its output is on standard error.
    """
    job = {
        "config": config,
        "decode": plan.decode,
        "prefill": plan.prefill,
        "seconds": plan.seconds,
        "weights_bytes": int(work.weights_bytes),
        "measure_limits": limits is None,
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", STEP_COSTS],
        input=msgspec.json.encode(job),
        stdout=subprocess.PIPE,
        check=False,
    )
    if done.returncode != 0:
        raise QuireError(f"measuring failed: {STEP_COSTS} ended with code {done.returncode}")
    result = msgspec.json.decode(done.stdout)
    if limits is None:
        limits = CpuLimits(
            {int(count): rate for count, rate in result["read_bandwidth"].items()},
            result["gemm_flops"],
        )
    steps = [
        *(("decode", row, work.decode(row["batch"], row["context"])) for row in result["decode"]),
        *(("prefill", row, work.prefill(row["context"])) for row in result["prefill"]),
    ]
    num_threads = result["num_threads"]
    return limits, [_phase(*step, work.quantized, limits, num_threads) for step in steps]


def _phase(
    name: str,
    row: dict[str, Any],
    work: StepWork,
    quantized: bool,
    limits: CpuLimits,
    num_threads: int,
) -> Phase:
    """Compares each turn's steps with the bandwidth and the products measured right after them.

    The medians of a turn are compared, since a shared machine's speed varies by the second; the
    result is the median of the turns' fractions. Turns without measurements use the limits.
    """
    share = num_threads / max(limits.read_bandwidth)  # products were measured on all threads
    bandwidths, flops, least, fractions = [], [], [], []
    for turn in row["turns"]:
        bandwidths.append(
            statistics.median(turn["read_bandwidth"] or [limits.bandwidth(num_threads)])
        )
        flops.append(statistics.median(turn["gemm_flops"] or [limits.flops(quantized) * share]))
        memory_s = work.num_bytes / bandwidths[-1]
        arithmetic_s = work.arithmetic_seconds(flops[-1], limits.flops(False) * share)
        least.append(
            (max(memory_s, arithmetic_s), "memory" if memory_s > arithmetic_s else "arithmetic")
        )
        fractions.append(least[-1][0] / statistics.median(turn["seconds"]))
    seconds = [seconds for turn in row["turns"] for seconds in turn["seconds"]]
    least_s, bound = statistics.median_high(least)
    return Phase(
        name,
        row["batch"],
        row["context"],
        num_threads,
        statistics.median(seconds),
        min(seconds),
        statistics.median(bandwidths),
        statistics.median(flops),
        least_s,
        bound,
        statistics.median(fractions),
    )
