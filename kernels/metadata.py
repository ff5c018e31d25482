"""Where the tokens of a step, and what their requests keep, are in memory. ops.py states the
conventions.

Must not know: how an operation is implemented, models, requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, eq=False)
class StateRows:
    """Where the state of each request of a step is, and when it is written."""

    # [B] i32, in [0, S), all different; negative: a row of padding, which reads and writes no state
    places: Tensor
    # [B] i64: the place gets the state after the token at this position, or after the row's last
    # token if that comes first. Drafts follow the position, since they may be rejected.
    last_positions: Tensor
    # [B] i64 and [B] i32: after the token at this position, the state is written to this place as
    # well. A negative position means none. No other row of the step has the place.
    copy_positions: Tensor
    copy_places: Tensor


@dataclass(frozen=True, eq=False)
class ImageRows:
    """What tokens whose places images take read, and how they see each other and are placed."""

    # [T] i32: the row of the table of encoded images that takes the place of the token's embedding;
    # negative: none
    rows: Tensor
    # [3, T] i32, added to the token's position: the components by which rotary pairs turn. All are
    # 0 where positions have one component.
    offsets: Tensor
    # [T] i32: how many positions after its own a token sees, in layers where tokens of an image
    # see each other. Within a request, position + later does not fall, and stays in the context.
    later: Tensor


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Where the tokens and KV-cache blocks of each request are, for one step.

    The model runner builds it, and all layers read it. The first `num_decodes` requests have
    exactly one query token. `seq_lens` includes this step's tokens. Entries of `block_tables` past
    a request's last block are not read. The lists hold the same values on the host, so that no
    caller waits for the device.
    """

    query_start_loc: Tensor  # [B + 1] i32, prefix sums of query_lens
    seq_lens: Tensor  # [B] i32
    block_tables: Tensor  # [B, max_blocks] i32
    slot_mapping: Tensor  # [T] i64, block * block_size + offset; negative: not stored
    num_decodes: int
    query_lens: list[int]  # [B]
    seq_lens_list: list[int]  # [B]
    # It holds the metadata of each group of layers with block tables of its own, the first group
    # included. Groups differ in block_tables and slot_mapping, which are rows of one tensor each.
    # It is empty for one group.
    groups: tuple[AttentionMetadata, ...] = ()
    # [T] i32: the place of each token's LoRA adapter, as in add_lora. It is None if the model takes
    # none.
    adapters: Tensor | None = None
    # None if the model keeps no states
    states: StateRows | None = None
    # None if the model reads no images
    images: ImageRows | None = None
    # It holds values that an implementation derives once per step for later layers.
    scratch: dict[Any, Any] = field(default_factory=dict)


def make_metadata(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Sequence[Tensor],
    slot_mappings: Sequence[Tensor],
    num_decodes: int,
    query_lens: list[int],
    seq_lens_list: list[int],
    adapters: Tensor | None = None,
    states: StateRows | None = None,
    images: ImageRows | None = None,
) -> AttentionMetadata:
    """Makes the metadata of a model whose groups of layers have these tables, one of each per
    group.
    """
    rows, lengths = (query_start_loc, seq_lens), (num_decodes, query_lens, seq_lens_list)
    pairs = [*zip(block_tables, slot_mappings, strict=True)]
    groups = tuple(AttentionMetadata(*rows, *pair, *lengths) for pair in pairs)
    groups = groups if len(pairs) > 1 else ()
    return AttentionMetadata(*rows, *pairs[0], *lengths, groups, adapters, states, images)
