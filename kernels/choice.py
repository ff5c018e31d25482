"""Declares the operations that choose a step's tokens with all options in few launches, with their
contracts. ops.py states the conventions and re-exports these.

Must not know: how an operation is implemented, requests, what asks for a change.
"""

# pyright: reportReturnType=false
# (a contract has no body)

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .registry import operation

MOST_LOGPROBS = 32  # likely tokens of a row that choose_tokens returns
OWN_LOGITS, NOT_SCORED = -1, -2  # of raw_rows


class LogitChanges(NamedTuple):
    """The changes of M rows of logits [B, V]; all on the device and contiguous.

    Row m's edits are those from edit_starts[m] to edit_starts[m + 1], its penalties likewise. No
    token occurs twice in a row's edits, nor in its penalties.
    """

    rows: Tensor  # [M] i64, all different
    raw_rows: Tensor  # [M] i64: the row of `raw` that gets a copy; -1: none
    mask_rows: Tensor  # [M] i64: the row of bitmask; -1: none
    bitmask: Tensor  # [G, ceil(V / 32)] i32, as in apply_grammar_bitmask
    edit_starts: Tensor  # [M + 1] i32
    edit_tokens: Tensor  # [E] i32
    edit_values: Tensor  # [E] f32, -inf to mask
    penalty_starts: Tensor  # [M + 1] i32
    penalty_tokens: Tensor  # [P] i32
    penalty_counts: Tensor  # [P] i32, as in apply_penalties
    penalties: Tensor  # [M, 3] f32: repetition, frequency and presence


@operation
def change_logits(logits: Tensor, largest: Tensor, raw: Tensor, changes: LogitChanges) -> Tensor:
    """In place, logits [B, V] f32: the rows of `changes` are masked by the bitmask, get the values
    of edits added, and are penalised as by apply_penalties, in this order.

    raw [N, V] f32 contiguous gets copies of rows from before. largest [B] i64 gets the token that
    argmax finds in each changed row. Returns [M] f32: the largest logit of each changed row, -inf
    if all are masked, NaN where the row has a NaN.
    """


@operation
def choose_tokens(
    logits: Tensor,
    largest: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    raw: Tensor,
    raw_rows: Tensor,
    k: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sample_tokens, and gather_logprobs of the tokens that it returns.

    Where temperature, seeds and positions are None, the tokens are largest [B] i64, what argmax
    finds. raw_rows [B] i64: the row of raw [N, V] f32 that a row of logits has its
    log-probabilities from, OWN_LOGITS for that row itself, or NOT_SCORED. 0 <= k <= MOST_LOGPROBS
    and V. Returns token ids [B] i64, ids [B, k + 1] i32, log-probabilities [B, k + 1] f32 and ranks
    [B] i32; the last three are undefined in rows without a score. Of equal tokens the lower id
    comes first.
    """
