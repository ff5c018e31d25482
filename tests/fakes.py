"""A fake executor and its oracle.

Tokens are computed by integer arithmetic. The executor mirrors slots, block tables and the KV
cache, and asserts that every step is consistent with them.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import msgspec
from quire.ipc.config import EngineConfig, config_fields
from quire.ipc.errors import InvalidParameterError, ModelLoadError
from quire.ipc.messages import Array, FinishReason
from quire.ipc.models.kv_layout import make_layout
from quire.ipc.params import SamplingParams, StructuredOutputsParams
from quire.ipc.step_messages import (
    ModelRunnerOutput,
    NewRequestData,
    PreemptionCosts,
    SchedulerOutput,
    SlotLogprobs,
)
from quire.ipc.trace import RanksTrace
from quire.tests.fake_encoder import FakeImages
from quire.tests.fake_loras import FakeLoras, extend_digest
from quire.tests.fake_offload import FakeOffload
from quire.tests.fake_states import FakeStates


def make_config(*, vocab_size: int = 97, **arguments) -> EngineConfig:
    """Make a small resolved configuration.

    `arguments` are flat names of EngineArgs (max_model_len, num_gpu_blocks_override, …).
    """
    defaults = {
        "max_model_len": 256,
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "num_gpu_blocks_override": 257,
    }
    sections: dict[str, dict] = {"model_config": {"hf_config": {"vocab_size": vocab_size}}}
    fields = config_fields()
    for name, value in {**defaults, **arguments}.items():
        sections.setdefault(fields[name].section, {})[name] = value
    return msgspec.convert(sections, EngineConfig)


def token_from_digest(digest: int, params: SamplingParams | None, vocab_size: int) -> int:
    """Sample the next token: from the digest alone if greedy, otherwise from the digest and the
    seed.
    """
    if params is not None and not params.is_greedy:
        digest = extend_digest(digest, params.seed or 0)
    return (digest >> 11) % vocab_size


def weights_digest(path: str) -> int:
    """Return the digest of the fake weights in a directory, which precedes the first token.

    The weights that the engine starts with have digest 0.
    """
    return zlib.crc32(path.encode())


def digest_of(token_ids: list[int], digest: int = 0) -> int:
    """Return the digest of the tokens, starting from `digest`, that of the weights."""
    for token_id in token_ids:
        digest = extend_digest(digest, token_id)
    return digest


def expected_output(
    prompt_token_ids: list[int],
    params: SamplingParams,
    eos_token_ids: list[int],
    config: EngineConfig,
    weights: int = 0,
) -> tuple[list[int], FinishReason, int | None]:
    """Return (output tokens, finish reason, stop reason) of a request without a script.

    The result does not depend on batching.
    """
    digest, output = digest_of(prompt_token_ids, weights), []
    while True:
        token_id = token_from_digest(digest, params, config.model_config.hf_config["vocab_size"])
        output.append(token_id)
        digest = extend_digest(digest, token_id)
        if len(output) >= params.min_tokens:
            if token_id in eos_token_ids:
                is_own = token_id == eos_token_ids[0]
                return output, FinishReason.STOP, None if is_own else token_id
            if token_id in (params.stop_token_ids or ()):
                return output, FinishReason.STOP, token_id
        if (
            len(output) >= params.max_tokens
            or len(prompt_token_ids) + len(output) >= config.model_config.max_model_len
        ):
            return output, FinishReason.LENGTH, None


@dataclass
class FakeSlot:
    """The state of one request, as a model runner keeps it."""

    request: NewRequestData
    token_ids: list[int]
    tables: list[list[int]]  # block ids, by group
    num_computed_tokens: int = 0
    has_failed: bool = False
    digest: int = 0  # of weights and adapter

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.request.num_prompt_tokens

    def digest_of_step(self, number: int) -> int:
        return zlib.crc32(f"{self.request.request_id} {number}".encode())


class FakeExecutor(FakeLoras):
    """Implements the Executor interface on digests.

    The KV cache holds digests, so a wrong block, table or order gives wrong tokens or an
    AssertionError. With `num_state_checkpoints`, the model keeps states: tokens follow from the
    digests in their places. With speculative_config, rows with lookahead verify drafts of which
    some are accepted.

    Scripts are keyed by (request_id, index of the output token). `tokens` forces a token (an EOS,
    for example), `errors` fails that row alone, and `nan_rows` fails it with the error of a NaN.
    `raise_at_step` raises in execute_model; `delay_s` sleeps in every step. `costs` gives the cost
    of swapping.
    """

    NAN_ERROR = "the model's logits are not finite"

    def __init__(self, config: EngineConfig):
        self.config = config
        self.block_size = config.cache_config.block_size
        self.vocab_size = config.model_config.hf_config["vocab_size"]
        self.tokens: dict[tuple[str, int], int] = {}
        self.errors: dict[tuple[str, int], str] = {}
        self.nan_rows: set[tuple[str, int]] = set()
        self.raise_at_step: int | None = None
        self.delay_s = 0.0
        self.burst_weights_bytes = 0
        self.kv_cache_windows: tuple[int, ...] = (0,)
        self.num_state_checkpoints: int | None = None
        self.max_num_seqs = config.scheduler_config.max_num_seqs
        self.states: FakeStates | None = None
        has_images = config.model_config.vision is not None
        self.images = FakeImages(config) if has_images else None
        self.drafts = config.scheduler_config.speculative_config is not None
        self.costs = PreemptionCosts(recompute_s_per_token=1.0, swap_s=20.0, swap_s_per_token=0.1)
        self.steps: list[SchedulerOutput] = []  # everything executed
        self.slots: dict[int, FakeSlot] = {}
        self.kv_cache: list[list[int | None]] = []  # [num_blocks][block_size] digests
        self.holders: Counter[int] = Counter()  # block id -> number of slots whose table has it
        self.grammar_checks: dict[str, Future[None]] = {}  # by regex
        self.host_cache: dict[int, list[int | None]] = {}  # host block id -> digests
        self.num_host_blocks = 0
        self.offload: FakeOffload | None = None
        self.thread = ThreadPoolExecutor(1)  # of overlapped steps
        self.num_dummy_batches = 0
        self.weights = 0  # see weights_digest
        super().__init__()
        self.asleep: set[str] = set()
        self.is_shut_down = False

    # ------------------------------------------------------------ the interface

    def load_model(self, report: Callable[[str, float], None]) -> None:
        report("load weights", 1.0)

    def determine_num_blocks(self) -> int:
        layout = make_layout(self.config, self.kv_cache_windows)
        blocks_per_sequence = layout.most_blocks(self.config.model_config.max_model_len)
        return self.config.cache_config.num_gpu_blocks_override or 1 + 4 * blocks_per_sequence

    def initialize_kv_cache(self, num_blocks: int) -> int:
        self.kv_cache = [[None] * self.block_size for _ in range(num_blocks)]
        if self.num_state_checkpoints is not None:
            num_slots = self.config.scheduler_config.max_num_seqs
            self.states = FakeStates(num_slots, self.num_state_checkpoints, drafts=self.drafts)
        return num_blocks * self.block_size * 8

    def initialize_swap_space(self) -> tuple[int, PreemptionCosts]:
        """Allocate as many host blocks as `swap_space` has MiB."""
        self.num_host_blocks = int(self.config.cache_config.swap_space * 1024)
        return self.num_host_blocks, self.costs

    def initialize_offload(self) -> FakeOffload | None:
        """Make a place for as many blocks as `kv_offloading_size` has MiB."""
        if size := self.config.cache_config.kv_offloading_size:
            self.offload = FakeOffload(
                int(size * 1024),
                lambda: self.kv_cache,
                lambda: [] if self.states is None else self.states.places,
                lambda: self.thread.submit(lambda: None).result(),
            )
        return self.offload

    def watch(self, on_failure: Callable[[str], None]) -> None:
        self.on_failure = on_failure

    def submit_model(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        return self.thread.submit(self.execute_model, step)

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.raise_at_step is not None and step.step >= self.raise_at_step:
            raise RuntimeError(f"scripted failure at step {step.step}")
        assert not self.asleep, f"a step while {self.asleep} are asleep"
        self._check_columns(step)
        for slot in step.freed_slots:
            self._free(slot)
        for slot, num_computed_tokens in zip(step.slots, step.num_computed_tokens, strict=True):
            if slot in self.slots:
                num_known = self.slots[slot].num_computed_tokens
                self._drop_unseen(self.slots[slot], min(num_known, num_computed_tokens))
        self._move_blocks(step)
        if self.states is not None:
            self.states.begin(step)
        else:
            assert not step.state_copies and not step.state_saves, step
        entered = [self._enter(new) for new in step.new_requests]
        for row, slot in enumerate(step.slots):
            self._extend_table(
                slot, step.new_block_ids[row], step.num_computed_tokens[row], slot in entered
            )
        if self.images is not None:
            self.images.begin(step, self.slots)
        self.steps.append(step)
        self.check_adapters(self.config, self.slots.values())
        return self._compute(step)

    def check_grammar(
        self, params: StructuredOutputsParams, *, is_known: bool = False, owner: str = ""
    ) -> Future[None]:
        """Return the scripted future of a grammar check, or one that is already done."""
        future = self.grammar_checks.get(params.regex)
        if future is None:
            future = Future()
            future.set_result(None)
        return future

    def _move_blocks(self, step: SchedulerOutput) -> None:
        """Swap out, swap in, then copy blocks.

        Fails if a block is filled twice or read after it was overwritten.
        """
        assert all(0 <= host < self.num_host_blocks for _, host in step.blocks_to_swap_out), (
            step.blocks_to_swap_out
        )
        for pairs in (step.blocks_to_swap_out, step.blocks_to_swap_in + step.blocks_to_copy):
            destinations = [destination for _, destination in pairs]
            assert len(set(destinations)) == len(destinations), f"a block is filled twice: {pairs}"
        for device, host in step.blocks_to_swap_out:
            self.host_cache[host] = list(self.kv_cache[device])
        filled = {device for _, device in step.blocks_to_swap_in}
        for host, device in step.blocks_to_swap_in:
            assert self.holders[device] == 0, (
                f"block {device} is swapped into while somebody holds it"
            )
            self.kv_cache[device] = self.host_cache.pop(host)
        for source, destination in step.blocks_to_copy:
            assert self.holders[destination] == 0 and destination not in filled, (
                f"block {destination} is copied onto while somebody holds it"
            )
            self.kv_cache[destination] = list(self.kv_cache[source])

    def execute_dummy_batch(self) -> None:
        self.num_dummy_batches += 1

    def collective_rpc(self, method: str, *args) -> list:
        known = "check_health", "expert_load", "memory_usage", "sleep", "wake_up", "load_weights"
        if method not in known:
            raise InvalidParameterError("method", f"must be one of check_health, …, got {method!r}")
        return [getattr(self, method)(*args)]

    def expert_load(self) -> dict[int, list[int]]:
        return {}

    def memory_usage(self) -> dict[str, int]:
        return {"kv_cache_bytes": len(self.kv_cache) * self.block_size * 8}

    def sleep(self, tags: list[str]) -> None:
        assert not self.asleep & set(tags), f"{tags} sleep already"
        self.asleep |= set(tags)
        if "kv_cache" in tags:
            self._num_blocks, self.kv_cache = len(self.kv_cache), []

    def wake_up(self, tags: list[str]) -> None:
        assert set(tags) <= self.asleep, f"{tags} do not sleep"
        if "kv_cache" in tags:
            assert "weights" not in self.asleep, "a cache without a model"
            self.initialize_kv_cache(self._num_blocks)
        self.asleep -= set(tags)

    def load_weights(self, path: str) -> None:
        """Load the fake weights. A path that contains "missing" raises and changes nothing."""
        if "missing" in path:
            raise ModelLoadError(f"{path}: no weights are there")
        self.weights = weights_digest(path)
        if self.offload is not None:
            self.offload.clear()
        self.asleep.discard("weights")

    def start_trace(self, num_steps: int) -> None:
        self.num_traced = num_steps

    def end_trace(self) -> RanksTrace:
        return RanksTrace(implementation="fake")

    def check_health(self) -> None:
        assert not self.is_shut_down

    def shutdown(self) -> None:
        self.thread.shutdown()
        self.is_shut_down = True

    # ------------------------------------------------------------ the mirror and its checks

    def _check_columns(self, step: SchedulerOutput) -> None:
        rows = len(step.slots)
        assert (
            rows
            == len(step.num_scheduled_tokens)
            == len(step.num_computed_tokens)
            == len(step.new_block_ids)
        ), step
        assert rows == len(set(step.slots)) > 0, f"empty step, or a slot twice: {step.slots}"
        assert min(step.num_scheduled_tokens) >= 1, step.num_scheduled_tokens
        assert (
            step.total_num_scheduled_tokens <= self.config.scheduler_config.max_num_batched_tokens
        ), step.num_scheduled_tokens
        assert {new.slot for new in step.new_requests} <= set(step.slots), (
            "a new request without a row"
        )
        assert not self.steps or step.step > self.steps[-1].step, "steps must be numbered upwards"

    def _free(self, slot: int) -> None:
        assert slot in self.slots, f"slot {slot} freed while free"
        for table in self.slots.pop(slot).tables:
            self.holders.subtract(block_id for block_id in table if block_id)

    def _enter(self, new: NewRequestData) -> int:
        assert 0 <= new.slot < self.config.scheduler_config.max_num_seqs, new.slot
        assert new.slot not in self.slots, (
            f"slot {new.slot} taken while held by {self.slots[new.slot].request.request_id}"
        )
        assert all(held.request.request_id != new.request_id for held in self.slots.values()), (
            f"{new.request_id} is in two slots"
        )
        tables = [[] for _ in self.kv_cache_windows]
        digest = self.weights
        if new.lora_request is not None:
            assert not new.lora_request.load_inplace
            digest = extend_digest(digest, self.adapters[new.lora_request.lora_int_id])
        self.slots[new.slot] = FakeSlot(new, list(new.token_ids), tables, digest=digest)
        return new.slot

    def _extend_table(
        self, slot: int, new_block_ids: list[int], num_computed_tokens: int, is_new: bool
    ) -> None:
        state, num_groups = self.slots[slot], len(self.kv_cache_windows)
        num_new, rest = divmod(len(new_block_ids), num_groups)
        assert not rest, f"tables of different lengths: {new_block_ids}"
        for group, (window, table) in enumerate(
            zip(self.kv_cache_windows, state.tables, strict=True)
        ):
            new = new_block_ids[group * num_new : (group + 1) * num_new]
            least = 0 if window and is_new else 1  # the null block, where the window has been
            assert all(least <= block_id < len(self.kv_cache) for block_id in new), (
                f"bad block in {new}"
            )
            table += new
        held = [block_id for table in state.tables for block_id in table if block_id]
        assert len(set(held)) == len(held), f"a block twice in {state.tables}"
        self.holders.update(block_id for block_id in new_block_ids if block_id)
        if not is_new:
            # where drafts are pending, it is the most that can be computed
            surplus = num_computed_tokens - state.num_computed_tokens
            continuous = surplus == 0 or state.has_failed or (self.drafts and surplus > 0)
            assert continuous, f"slot {slot}: computed tokens are not continuous"
            return
        assert num_computed_tokens < len(state.token_ids), (
            "at least one token must be left to compute"
        )
        state.num_computed_tokens = num_computed_tokens
        self._check_seen(state)

    def _check_seen(self, state: FakeSlot) -> int:
        """Check that every group holds what the next token sees; return the last digest. Rows of
        images that others have computed are not known here.
        """
        if state.request.images and state.num_computed_tokens:
            last = {
                self._read(table, state.num_computed_tokens - 1)
                for table, window in zip(state.tables, self.kv_cache_windows, strict=True)
                if window != 1  # the next token sees itself alone
            }
            assert len(last) == 1 and None not in last, "groups hold different tokens"
            return last.pop()
        digests, digest = [], state.digest
        for token_id in state.token_ids[: state.num_computed_tokens]:
            digests.append(digest := extend_digest(digest, token_id))
        for window, table in zip(self.kv_cache_windows, state.tables, strict=True):
            first = max(0, len(digests) + 1 - window) if window else 0
            for position in range(first, len(digests)):
                assert self._read(table, position) == digests[position], (
                    f"{state.request.request_id}: a block does not hold its tokens"
                )
        return digest

    def _drop_unseen(self, state: FakeSlot, num_tokens: int) -> None:
        """Forget blocks that no token after `num_tokens` sees: another request may have them."""
        for window, table in zip(self.kv_cache_windows, state.tables, strict=True):
            num_unseen = max(0, num_tokens + 1 - window) // self.block_size if window else 0
            for index, block_id in enumerate(table[:num_unseen]):
                self.holders[block_id] -= block_id > 0
                table[index] = 0

    def _read(self, table: list[int], position: int) -> int | None:
        return self.kv_cache[table[position // self.block_size]][position % self.block_size]

    def _compute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        num_sampled, token_ids, logprobs, errors, num_ahead = [], [], [], {}, []
        lookahead = step.num_lookahead_tokens or [0] * len(step.slots)
        assert len(lookahead) == len(step.slots), step
        for slot, num_tokens, num_lookahead in zip(
            step.slots, step.num_scheduled_tokens, lookahead, strict=True
        ):
            state = self.slots[slot]
            sampled = []
            if self.drafts and not state.has_failed:
                # it was scheduled before the drafts of the step before were known to be refused
                num_tokens = min(num_tokens, len(state.token_ids) - state.num_computed_tokens)
            end = state.num_computed_tokens + num_tokens
            num_accepted = self._accept(state, num_lookahead) if self.drafts else num_lookahead
            for _ in range(1 + num_accepted):
                # A step before this one; this row was scheduled before its result was known.
                if state.has_failed:
                    break
                is_draft = self.drafts and bool(sampled)
                digest = self._write(state, 1 if sampled else num_tokens, is_draft=is_draft)
                if state.num_computed_tokens < len(state.token_ids):
                    assert num_lookahead == 0, "lookahead behind a prompt that is not complete"
                    break
                token_id = self._sample(state, digest, errors)
                if token_id is None:
                    break
                sampled.append(token_id)
            if self.drafts:
                num_ahead.append(self._reject(state, end))
            num_sampled.append(len(sampled))
            token_ids += sampled
            if (
                sampled
                and (params := state.request.sampling_params) is not None
                and params.logprobs is not None
            ):
                logprobs.append(self._logprobs(slot, sampled, params.logprobs))
        return ModelRunnerOutput(num_sampled, token_ids, logprobs, errors, num_ahead=num_ahead)

    def _accept(self, state: FakeSlot, num_lookahead: int) -> int:
        """Return how many of a row's drafts are what the model draws."""
        return state.digest_of_step(len(self.steps)) % (num_lookahead + 1)

    def _reject(self, state: FakeSlot, end: int) -> int:
        """Return how many tokens after the first `end` count as computed. A state is kept before
        the first draft, which may be rejected.
        """
        if self.states is not None and not state.has_failed:
            state.num_computed_tokens = min(end, state.num_computed_tokens)
        return max(0, state.num_computed_tokens - end)

    def _sample(self, state: FakeSlot, digest: int, errors: dict[int, str]) -> int | None:
        """Append the next token to the slot and return it. On failure, return None and add to
        `errors`.
        """
        key = (state.request.request_id, state.num_output_tokens)
        error = self.NAN_ERROR if key in self.nan_rows else self.errors.get(key)
        if error is not None:
            errors[state.request.slot] = error
            state.has_failed = True
            return None
        token_id = self.tokens.get(
            key, token_from_digest(digest, state.request.sampling_params, self.vocab_size)
        )
        state.token_ids.append(token_id)
        return token_id

    def _write(self, state: FakeSlot, num_tokens: int, *, is_draft: bool) -> int:
        """Compute `num_tokens` tokens into the slot's blocks and return the last digest. A draft
        leaves the state as it is.
        """
        start, end = state.num_computed_tokens, state.num_computed_tokens + num_tokens
        assert end <= len(state.token_ids), (
            f"{state.request.request_id}: scheduled beyond its tokens"
        )
        for table in state.tables:
            assert end <= len(table) * self.block_size, (
                f"{state.request.request_id}: table does not cover {end} tokens"
            )
            for block_id in table[start // self.block_size : -(-end // self.block_size)]:
                assert self.holders[block_id] == 1, (
                    f"{state.request.request_id} writes into block {block_id}, which others hold"
                )
        if self.kv_cache_windows != (0,):
            digest = self._check_seen(state)
        else:
            digest = self._read(state.tables[0], start - 1) if start else state.digest
        slot, states = state.request.slot, None if is_draft else self.states
        if states is not None:
            digest = states.read(slot, start, state.digest)
        for position in range(start, end):
            digest = extend_digest(digest, state.token_ids[position])
            if states is not None:
                states.write(slot, position, digest)
            for table in state.tables:
                self.kv_cache[table[position // self.block_size]][position % self.block_size] = (
                    digest
                )
        state.num_computed_tokens = end
        return digest

    def _logprobs(self, slot: int, sampled: list[int], k: int) -> SlotLogprobs:
        ids = [
            i
            for token_id in sampled
            for i in (token_id, *((token_id + 1 + j) % self.vocab_size for j in range(k)))
        ]
        values = [-0.5 * (j + 1) for _ in sampled for j in range(k + 1)]
        return SlotLogprobs(
            slot,
            Array("i4", (len(sampled), k + 1), array("i", ids).tobytes()),
            Array("f4", (len(sampled), k + 1), array("f", values).tobytes()),
            Array("i4", (len(sampled),), array("i", [1] * len(sampled)).tobytes()),
        )
