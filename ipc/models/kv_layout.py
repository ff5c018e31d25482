"""How a model's layers share the blocks of the KV cache, as pure arithmetic.

Must not know: torch, models, requests, how much memory there is.

Layers with the same sliding window form groups of about the same size; a larger set is split into
several groups. A block holds the keys and values of block_size tokens in the layers of any one
group, so every block is of the same size, and one pool serves all groups. A request has one block
table for each group. A group with a window returns the blocks that its window has left.

    layers    s s s s s f s s s s s f     (s: sliding, f: full)
    groups    f f | s s | s s | s s | s s | s s
    a block   two pages, of the two layers of any one group

If layers differ in the size of a token's keys and values, so does the number of layers of a group:

    layers    s s s s f s s s s f         (a token takes twice as much in f)
    groups    f f | s s s s | s s s s
    a block   parts of two layers, or of four of half the size
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ..config import EngineConfig, resolved
from .ranks import num_steps_in_flight

if TYPE_CHECKING:
    from .decoder_config import DecoderConfig

MAX_BURST = 8  # most passes of the model in one step for num_scheduler_steps=0
MAX_DRAFTING_BURST = 32  # most tokens of a request in several passes that verify drafts
# A set of layers that is at most this much larger than the smallest is padded, not split.
MOST_PADDING = 1.25


def lookahead_of(num_passes: int, tokens_per_pass: int) -> int:
    """The most tokens of a row after its first one, in a step of so many passes, each of which may
    give the row `tokens_per_pass`.
    """
    if num_passes > 1 and tokens_per_pass > 1:
        return max(tokens_per_pass, min(MAX_DRAFTING_BURST, num_passes * tokens_per_pass)) - 1
    return num_passes * tokens_per_pass - 1


class LayerGroups(NamedTuple):
    layers: tuple[tuple[int, ...], ...]  # of each group: indices of its layers
    windows: tuple[int, ...]  # of each group; 0: none

    @property
    def pages(self) -> tuple[int, ...]:
        """One layer for each page of a block, where all layers have pages of the same size."""
        return max(self.layers, key=len)

    def largest(self, sizes: Sequence[int]) -> int:
        """The size of the largest group, for these sizes of layers."""
        return max(sum(sizes[layer] for layer in layers) for layers in self.layers)


def group_layers(windows: Sequence[int], sizes: Sequence[int], max_model_len: int) -> LayerGroups:
    """Divides layers into groups, those without a window first.

    `windows`: for each layer the number of positions that a token sees; 0: all. A window that no
    context exceeds is none. `sizes`: of a token's keys and values in each layer, in any unit.
    """
    by_window: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window if window < max_model_len else 0, []).append(layer)
    totals = [sum(sizes[layer] for layer in layers) for layers in by_window.values()]
    most = max(totals) if max(totals) <= MOST_PADDING * min(totals) else min(totals)
    groups: list[tuple[int, list[int]]] = []
    for window, layers in sorted(by_window.items()):
        room = 0
        for layer in layers:
            if room < sizes[layer]:
                groups.append((window, []))
                room = most
            groups[-1][1].append(layer)
            room -= sizes[layer]
    return LayerGroups(tuple(tuple(layers) for _, layers in groups), tuple(w for w, _ in groups))


def plan_groups(config: EngineConfig, windows: Sequence[int], sizes: Sequence[int]) -> LayerGroups:
    """The groups of an engine whose layers can be in any. See group_layers."""
    if not windows or config.scheduler_config.disable_hybrid_kv_cache_manager:
        return one_group(len(windows))
    return group_layers(windows, sizes, resolved(config.model_config.max_model_len))


def plan_groups_of_stage(
    config: EngineConfig, shape: DecoderConfig, stages: Sequence[range], stage: int
) -> LayerGroups:
    """The groups of the layers of one of several stages, counted from its first one that owns a
    part of the cache. All stages have as many groups of each window, since they have the same block
    tables; some may be empty. stages: the layers of each.
    """
    owners, windows = shape.cache_layers, shape.sliding_windows or (0,) * shape.num_hidden_layers
    planned, most = [], Counter[int]()
    for layers in stages:
        own = [index for index in layers if index in owners]
        kinds = [shape.layer(index) for index in own]
        sizes = [(1 + one.has_values) * one.num_kv_heads * one.head_dim for one in kinds]
        planned.append(plan_groups(config, [windows[index] for index in own], sizes))
        if own:
            most |= Counter(planned[-1].windows)
    if not most:  # no layer has keys and values
        return one_group(0)
    groups: list[tuple[int, ...]] = []
    mine = list(zip(planned[stage].layers, planned[stage].windows, strict=True))
    for window in sorted(most):
        of_window = [layers for layers, one in mine if one == window and layers]
        groups += [*of_window, *[()] * (most[window] - len(of_window))]
    return LayerGroups(tuple(groups), tuple(sorted(most.elements())))


def one_group(num_layers: int) -> LayerGroups:
    """All layers in one group that keeps the whole context."""
    return LayerGroups((tuple(range(num_layers)),), (0,))


class KVLayout:
    """How many blocks requests hold. `windows`: of each group of layers; 0: none."""

    def __init__(self, block_size: int, windows: Sequence[int] = (0,), max_new_tokens: int = 1):
        """`max_new_tokens`: the most tokens of a request in steps that have not ended."""
        self.block_size = block_size
        self.windows = tuple(windows)
        self.has_windows = any(self.windows)
        # (window, the most blocks of one group, number of groups)
        self._kinds = [
            (window, -(-(window + max_new_tokens - 2) // block_size) + 1 if window else 0, count)
            for window, count in Counter(self.windows).items()
        ]

    def first_seen(self, window: int, num_tokens: int) -> int:
        """The first block that the token after `num_tokens` tokens sees."""
        return max(0, num_tokens + 1 - window) // self.block_size if window else 0

    def longest_kept(self, most: int, is_missing: Callable[[int, int], bool]) -> int:
        """The longest beginning of a sequence, of at most `most` blocks, of which no block is
        missing that the next token sees. is_missing: of a group and a block's index.
        """
        num_blocks, before = most, -1
        while num_blocks != before:
            before = num_blocks
            for group, window in enumerate(self.windows):
                num_blocks = self._longest_in(num_blocks, window, partial(is_missing, group))
            if not self.has_windows:  # else a shorter beginning needs other blocks
                break
        return num_blocks

    def _longest_in(self, most: int, window: int, is_missing: Callable[[int], bool]) -> int:
        if not window:
            return next(filter(is_missing, range(most)), most)
        num_blocks = index = most
        while index > self.first_seen(window, num_blocks * self.block_size):
            index -= 1
            if is_missing(index):
                num_blocks = index
        return num_blocks

    def most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request holds at a time until it has `num_tokens` tokens."""
        num_blocks = -(-num_tokens // self.block_size)
        return sum(
            count * (min(num_blocks, most) if window else num_blocks)
            for window, most, count in self._kinds
        )

    def missing_blocks(self, num_tokens: int, num_computed: int, num_executed: int) -> int:
        """Blocks that a running request still needs at a time, at most, for `num_tokens` tokens.

        It holds those of `num_computed` tokens, without those that the window of the token after
        `num_executed` tokens has left.
        """
        num_blocks = -(-num_tokens // self.block_size)
        num_held = -(-num_computed // self.block_size)
        return sum(
            count
            * max(
                0,
                (min(num_blocks, most) if window else num_blocks)
                - num_held
                + self.first_seen(window, num_executed),
            )
            for window, most, count in self._kinds
        )

    def longest(self, num_blocks: int, limit: int) -> int:
        """The longest sequence in tokens that `num_blocks` blocks hold, at most `limit` rounded up
        to whole blocks.
        """
        low, high = 0, -(-limit // self.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.most_blocks(middle * self.block_size) <= num_blocks:
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    def held_share(self, num_tokens: int) -> float:
        """The part of a context's keys and values that a request of this length keeps, from 0 to
        1.
        """
        seen = sum(
            count * (min(num_tokens, window) if window else num_tokens)
            for window, _, count in self._kinds
        )
        return seen / (num_tokens * len(self.windows)) if num_tokens else 1.0


def make_layout(config: EngineConfig, windows: Sequence[int]) -> KVLayout:
    """The layout of an engine with these groups of layers."""
    scheduling = config.scheduler_config
    num_tokens = resolved(scheduling.max_num_batched_tokens)
    if scheduling.enable_chunked_prefill and scheduling.long_prefill_token_threshold:
        num_tokens = min(num_tokens, scheduling.long_prefill_token_threshold)
    drafts = scheduling.speculative_config
    tokens_per_pass = 1 + (drafts.num_speculative_tokens if drafts is not None else 0)
    num_tokens += lookahead_of(scheduling.num_scheduler_steps or MAX_BURST, tokens_per_pass)
    num_tokens *= num_steps_in_flight(config)
    return KVLayout(config.cache_config.block_size, windows, num_tokens)
